"""Tensors in files that any program can read: safetensors and JSON. Never pickle."""
