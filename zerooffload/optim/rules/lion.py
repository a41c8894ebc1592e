"""Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerooffload.optim.rules.rule import Moment


class LionRule:
    """Its scalars: grad_factor, decay, beta1, 1 - beta1, beta2, 1 - beta2, lr."""

    name: str = "lion"
    moments: tuple[Moment, ...] = (Moment("exp_avg"),)

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:  # noqa: ARG002
        """See `Rule`."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return (grad_factor, 1.0 - lr * group["weight_decay"], beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr)

    def step(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]
    ) -> None:
        """See `Rule`."""
        (exp_avg,) = moments
        grad_factor, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
        scaled = grad.mul(grad_factor)
        direction = exp_avg.mul(beta1).add_(scaled.mul(one_minus_beta1))
        exp_avg.mul_(beta2).add_(scaled.mul(one_minus_beta2))
        param.mul_(decay).sub_(_sign(direction).mul_(lr))


def _sign(value: torch.Tensor) -> torch.Tensor:
    """-1, 1, or the value itself where it is 0 or NaN."""
    one = torch.ones((), dtype=value.dtype, device=value.device)
    return torch.where(value > 0, one, torch.where(value < 0, -one, value))
