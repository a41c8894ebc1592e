"""Adam with L2 regularization: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerooffload.optim.rules.adamw import adam_change, adam_scalars
from zerooffload.optim.rules.rule import Moment


class AdamRule:
    """Its scalars: grad_factor, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps,
    lr / (1 - beta1^t).
    """

    name: str = "adam"
    moments: tuple[Moment, ...] = (Moment("exp_avg"), Moment("exp_avg_sq", non_negative=True))

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        """See `Rule`."""
        return (grad_factor, group["weight_decay"], *adam_scalars(group, step))

    def step(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]
    ) -> None:
        """See `Rule`."""
        grad_factor, weight_decay, *rest = scalars
        regularized = grad.mul(grad_factor).add_(param.mul(weight_decay))
        param.sub_(adam_change(moments, regularized, rest))
