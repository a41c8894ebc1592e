"""How far two AdamWs may drift apart that round differently, by running error analysis.

[Note: the bound]
Both optimizers compute the same real functions of a step's inputs and round each operation. With u = 2^-24 every fp32
operation, and every scalar rounded to fp32, is off by a factor of at most 1 + u, so after k of them a value is off by
at most k u / (1 - k u) of its magnitude (Higham, "Accuracy and Stability of Numerical Algorithms", lemma 3.1), and by
one least subnormal for each if it underflows. What remains is the propagation of the differences that the inputs
already have. For one element, with d* the bound on the difference of *, all in float64:

    dg' = f dg + |g| df + roundings                                            the clipped gradient
    dm' = b1 dm + (1 - b1) dg' + roundings                                     linear
    dv' = b2 dv + (1 - b2) (2 |g'| dg' + dg'^2) + roundings                    |x^2 - y^2| <= 2 |x| |x-y| + |x-y|^2
    dd  = min(dv' / sqrt(v'), sqrt(dv')) / sqrt(1 - b2^t) + roundings        |sqrt x - sqrt y| (sqrt x + sqrt y) = |x-y|
    dq  = (dm' + |m'/d| dd) / (d - dd) + roundings                             q = m' / d, if dd < d
    dp' = (1 - lr wd) dp + lr / (1 - b1^t) dq + roundings

Gradients are not derived but measured, because they are a function of the model: `dg` is the difference of the two
gradients as they came from backward. A wrong optimizer is still found: at its first wrong step the inputs are equal up
to the bound, and its outputs are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

U = 2.0**-24
_LEAST_SUBNORMAL = 2.0**-149
_LEAST_NORMAL = 2.0**-126

# Roundings that each side makes, scalars' included; the more of the two sides. Ours: see `optim.reference`. Torch's,
# for one tensor (torch/optim/adam.py): lerp is m + w (g - m), so its sum cancels and counts by its terms; addcmul is
# v + w g g; sqrt may be off by a whole unit (2 u); addcdiv is p + s m / d.
_GRAD, _MOMENT, _SQUARE, _DENOMINATOR, _STEP = 1, 5, 5, 7, 6


def gamma(num_roundings: int) -> float:
    """The relative error of so many roundings."""
    return num_roundings * U / (1 - num_roundings * U)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step's exact scalars."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    number: int


class RoundingBound:
    """Bounds one parameter's difference between two optimizers that start equal. All tensors float64, of its shape."""

    def __init__(self, param: torch.Tensor) -> None:
        # The differences' bounds, not the values.
        self.param, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(param, dtype=torch.float64) for _ in range(3))

    def step(
        self,
        values: dict[str, torch.Tensor],
        grad: tuple[torch.Tensor, torch.Tensor],
        factor: tuple[float, float],
        step: Step,
    ) -> None:
        """Propagate through a step.

        Parameters
        ----------
        values : dict
            One side's "param" and "exp_avg", "exp_avg_sq" before the step.
        grad : tuple
            That side's gradient before clipping, and the size of its difference to the other's.
        factor : tuple
            That side's clip factor, and a bound on the difference to the other's.
        """
        beta1, beta2 = step.betas
        raw, raw_difference = grad
        clip, clip_difference = factor
        both = 2.0
        g = clip * raw.abs()
        dg = clip * raw_difference + clip_difference * (raw.abs() + raw_difference)
        dg = dg + both * (gamma(_GRAD) * (g + dg) + _LEAST_SUBNORMAL)

        # Magnitudes of the terms of each sum, as large as they are on either side.
        m_terms = beta1 * (values["exp_avg"].abs() + self.exp_avg) + (1 - beta1) * (g + dg)
        lerp_terms = values["exp_avg"].abs() + self.exp_avg + m_terms
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * dg
        self.exp_avg += gamma(_MOMENT) * (m_terms + lerp_terms) + both * _MOMENT * _LEAST_SUBNORMAL

        v_terms = beta2 * (values["exp_avg_sq"] + self.exp_avg_sq) + (1 - beta2) * (g + dg).square()
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * (2 * g * dg + dg.square())
        self.exp_avg_sq += both * (gamma(_SQUARE) * v_terms + _SQUARE * _LEAST_SUBNORMAL)

        signed = clip * raw
        m = (beta1 * values["exp_avg"] + (1 - beta1) * signed).abs()
        v = beta2 * values["exp_avg_sq"] + (1 - beta2) * signed.square()
        bias2_sqrt = math.sqrt(1 - beta2**step.number)
        root_difference = torch.minimum(self.exp_avg_sq / v.sqrt().clamp(min=_LEAST_NORMAL), self.exp_avg_sq.sqrt())
        d = v.sqrt() / bias2_sqrt + step.eps
        dd = root_difference / bias2_sqrt
        dd = dd + both * gamma(_DENOMINATOR) * (d + dd)
        quotient = m / d
        dq = torch.where(dd < d, (self.exp_avg + quotient * dd) / (d - dd), torch.inf)

        step_size = step.learning_rate / (1 - beta1**step.number)
        decay = 1 - step.learning_rate * step.weight_decay
        terms = decay * (values["param"].abs() + self.param) + step_size * (quotient + dq)
        self.param = decay * self.param + step_size * dq + both * gamma(_STEP) * terms


def norm_difference(norm: float, grad_difference: float, numel: int) -> float:
    """A bound on the difference of two norms, one exact, one by torch in fp32, of gradients that differ by so much.

    The triangle inequality, and torch's roundings: a sum of `numel` squares in any order, the roots, and the sum over
    the parameters.
    """
    return grad_difference + gamma(numel + 8) * (norm + grad_difference)


def clip_factor(norm: float, max_norm: float) -> float:
    """Torch's, exactly; either side rounds four times at most."""
    return min(1.0, max_norm / (norm + 1e-6))
