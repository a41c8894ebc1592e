"""AdamW in fp32 stays as close to exact arithmetic as the number of its roundings says."""

from __future__ import annotations

import pytest
import torch
from support.rounding_bound import gamma

from zerooffload.optim.kernels import TorchKernels, host_kernels
from zerooffload.optim.rules import RULES
from zerooffload.optim.rules.rule import step_scalars

NUMEL = 4096
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
GROUP = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "maximize": False}


def gradients(num_steps: int) -> torch.Tensor:
    """fp32 `[num_steps, numel]`, with a part that stays and one that changes; nothing near underflow."""
    generator = torch.Generator().manual_seed(1)
    steady = torch.randn(NUMEL, generator=generator)
    noise = torch.randn(num_steps, NUMEL, generator=generator)
    sizes = torch.logspace(-3, 1, NUMEL)
    return ((0.3 * steady + noise) * sizes).clamp(min=-50, max=50) + 1e-6


@pytest.mark.parametrize("num_steps", [1, 100])
@pytest.mark.parametrize("kernels", [TorchKernels(), host_kernels(1)], ids=["torch", "host"])
def test_adamw_is_off_by_no_more_than_its_roundings(kernels, num_steps: int) -> None:
    """After T steps, against AdamW in double.

    With u = 2^-24, an operation in fp32 and a scalar that was rounded to fp32 are off by a factor of at most 1 + u
    each, k of them together by at most gamma(k) = k u / (1 - k u), and such factors multiply: gamma(j) and gamma(k)
    make at most gamma(j + k) (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). Gradients are
    exact and their factor is 1. Counting scalars as roundings:

    - m = sum over s of b1^(t-s) (1-b1) g_s. A term has 3 roundings when it comes (scalar, product, sum) and 3 in each
      later step (b1, product, sum): 3 t at most. So |dm| <= gamma(3 t) M, where M is the sum of the terms' magnitudes.
    - v = sum of b2^(t-s) (1-b2) g_s^2. One more when it comes, for the square: 3 t + 1. All terms are positive, so v is
      off by a factor within gamma(3 t + 1), and its root as well (a root halves a relative error).
    - d = sqrt(v) (1 / sqrt(1-b2^t)) + eps: root, bias, product and sum; eps itself has 2 of these: 3 t + 5, all
      positive.
    - c = (lr / (1-b1^t)) (m / d): division, scalar and product: |dc| <= gamma(3 t + 3 t + 5 + 3) c' (with M for m).
    - p = p0 decay^T - sum over t of c_t decay^(T-t): p0 has 3 in each step (decay, product, difference), c_t has 1 when
      it comes and 3 in each later step. So

          |dp| <= gamma(3 T) |p0| decay^T + sum over t of gamma(6 t + 9 + 3 (T - t)) c'_t decay^(T-t)

    The double computation is exact beside this: its roundings are smaller by 2^-29.
    """
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2))
    param = start.clone()
    record = {"exp_avg": torch.zeros(NUMEL), "exp_avg_sq": torch.zeros(NUMEL)}
    (beta1, beta2), decay = BETAS, 1 - LR * WEIGHT_DECAY
    p, m, v, magnitude = start.double(), *torch.zeros(3, NUMEL, dtype=torch.float64)
    bound = gamma(3 * num_steps) * p.abs() * decay**num_steps
    for number, grad in enumerate(gradients(num_steps), start=1):
        kernels.step(step_scalars(RULES["adamw"], GROUP, number, 1.0), param, record, grad, 0)
        g = grad.double()
        m = beta1 * m + (1 - beta1) * g
        magnitude = beta1 * magnitude + (1 - beta1) * g.abs()
        v = beta2 * v + (1 - beta2) * g * g
        d = v.sqrt() / (1 - beta2**number) ** 0.5 + EPS
        step_size, later = LR / (1 - beta1**number), num_steps - number
        p = p * decay - step_size * m / d
        bound += gamma(6 * number + 9 + 3 * later) * step_size * magnitude / d * decay**later

    assert ((record["exp_avg"].double() - m).abs() <= gamma(3 * num_steps) * magnitude).all()
    assert ((record["exp_avg_sq"].double() - v).abs() <= gamma(3 * num_steps + 1) * v).all()
    error = (param.double() - p).abs()
    assert (error <= bound).all()
    # And the bound says something: it is not far from what one operation in fp32 may do, for each step.
    assert float((bound / (p.abs() + num_steps * LR)).max()) < num_steps * 64 * 2.0**-24
