"""The optimizers' faces, their rules and kernels, the streamed update and the gradient norm."""

from zerooffload.optim.adagrad import Adagrad
from zerooffload.optim.adam import Adam, AdamW
from zerooffload.optim.grad_scaler import GradScaler
from zerooffload.optim.lion import Lion
from zerooffload.optim.sgd import SGD

OPTIMIZERS = {optimizer.RULE.name: optimizer for optimizer in (AdamW, Adam, Adagrad, Lion, SGD)}
"""The optimizers by the names of their rules."""

__all__ = ["OPTIMIZERS", "SGD", "Adagrad", "Adam", "AdamW", "GradScaler", "Lion"]
