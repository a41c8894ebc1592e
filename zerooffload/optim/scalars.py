"""The scalars of an AdamW step, computed in double."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AdamWScalars:
    """The nine factors of one step; each is exactly an fp32 value, rounded once from double.

    Attributes
    ----------
    grad_factor : float
        Unscales, clips and (negative) maximizes.
    decay : float
        `1 - lr * weight_decay`.
    beta1, one_minus_beta1, beta2, one_minus_beta2 : float
    bias2_sqrt : float
        `sqrt(1 - beta2^t)`.
    eps : float
    step_size : float
        `lr / (1 - beta1^t)`.
    """

    grad_factor: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
    eps: float
    step_size: float


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Hyperparameters of one parameter at one step; `step` is 1 for its first update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool
    grad_factor: float
    step: int

    def scalars(self) -> AdamWScalars:
        """The factors, after Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019)."""
        beta1, beta2 = self.betas
        return AdamWScalars(
            grad_factor=_rounded(-self.grad_factor if self.maximize else self.grad_factor),
            decay=_rounded(1.0 - self.lr * self.weight_decay),
            beta1=_rounded(beta1),
            one_minus_beta1=_rounded(1.0 - beta1),
            beta2=_rounded(beta2),
            one_minus_beta2=_rounded(1.0 - beta2),
            bias2_sqrt=_rounded(math.sqrt(1.0 - beta2**self.step)),
            eps=_rounded(self.eps),
            step_size=_rounded(self.lr / (1.0 - beta1**self.step)),
        )


def _rounded(value: float) -> float:
    return float(np.float32(value))
