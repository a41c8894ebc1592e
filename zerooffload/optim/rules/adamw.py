"""AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerooffload.optim.rules.rule import Moment, rounded_sqrt


class AdamWRule:
    """Its scalars: grad_factor, decay, beta1, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps,
    lr / (1 - beta1^t).
    """

    name: str = "adamw"
    moments: tuple[Moment, ...] = (Moment("exp_avg"), Moment("exp_avg_sq", non_negative=True))

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        """See `Rule`."""
        return (grad_factor, 1.0 - float(group["lr"]) * group["weight_decay"], *adam_scalars(group, step))

    def step(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]
    ) -> None:
        """See `Rule`."""
        grad_factor, decay, *rest = scalars
        change = adam_change(moments, grad.mul(grad_factor), rest)
        param.mul_(decay).sub_(change)


def adam_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    """What Adam and AdamW have in common, from beta1 on."""
    beta1, beta2 = group["betas"]
    root_factor, step_size = 1.0 / math.sqrt(1.0 - beta2**step), float(group["lr"]) / (1.0 - beta1**step)
    return (beta1, 1.0 - beta1, beta2, 1.0 - beta2, root_factor, group["eps"], step_size)


def adam_change(moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]) -> torch.Tensor:
    """Step the moments; what is to be subtracted from the parameter."""
    exp_avg, exp_avg_sq = moments
    beta1, one_minus_beta1, beta2, one_minus_beta2, root_factor, eps, step_size = scalars
    exp_avg.mul_(beta1).add_(grad.mul(one_minus_beta1))
    exp_avg_sq.mul_(beta2).add_(grad.mul(grad).mul_(one_minus_beta2))
    denominator = rounded_sqrt(exp_avg_sq).mul_(root_factor).add_(eps)
    return exp_avg.div(denominator).mul_(step_size)
