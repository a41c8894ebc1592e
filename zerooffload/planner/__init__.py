"""What a run will hold and take, decided and checked before it begins."""
