"""The public functions: on models, in a training loop, for checkpoints."""
