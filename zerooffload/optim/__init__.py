"""The optimizer's face, its kernels, the streamed update and the gradient norm."""

from zerooffload.optim.adamw import AdamW

__all__ = ["AdamW"]
