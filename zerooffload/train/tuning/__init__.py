"""Tuning: short real steps of configurations around a plan, the fastest of which is kept."""
