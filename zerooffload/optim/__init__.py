"""The optimizers' faces, their rules and kernels, the streamed update and the gradient norm."""

from zerooffload.optim.adagrad import Adagrad
from zerooffload.optim.adam import Adam, AdamW
from zerooffload.optim.grad_scaler import GradScaler
from zerooffload.optim.lion import Lion
from zerooffload.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "GradScaler", "Lion"]
