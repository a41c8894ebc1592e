"""Adagrad: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning", 2011."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerooffload.optim.rules.rule import Moment, rounded_sqrt


class AdagradRule:
    """Its scalars: grad_factor, weight_decay, initial sum (at the first step), eps, lr / (1 + (t - 1) * lr_decay)."""

    name: str = "adagrad"
    moments: tuple[Moment, ...] = (Moment("sum", non_negative=True),)

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        """See `Rule`."""
        initial = group["initial_accumulator_value"] if step == 1 else 0.0
        step_size = float(group["lr"]) / (1.0 + (step - 1) * group["lr_decay"])
        return (grad_factor, group["weight_decay"], initial, group["eps"], step_size)

    def step(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]
    ) -> None:
        """See `Rule`."""
        (total,) = moments
        grad_factor, weight_decay, initial, eps, step_size = scalars
        regularized = grad.mul(grad_factor).add_(param.mul(weight_decay))
        total.add_(initial).add_(regularized.mul(regularized))
        param.sub_(regularized.div(rounded_sqrt(total).add_(eps)).mul_(step_size))
