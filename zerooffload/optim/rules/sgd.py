"""SGD with momentum: Polyak, 1964; Nesterov's form after Sutskever et al., 2013."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerooffload.optim.rules.rule import Moment


class SgdRule:
    """Its scalars: grad_factor, weight_decay, momentum, 1 - dampening, weights of gradient and buffer, lr."""

    name: str = "sgd"
    moments: tuple[Moment, ...] = (Moment("momentum_buffer"),)

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        """See `Rule`. The first step sets the buffer to the gradient, as torch does."""
        momentum = group["momentum"]
        new_weight = 1.0 if step == 1 or not momentum else 1.0 - group["dampening"]
        weights = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
        return (grad_factor, group["weight_decay"], momentum, new_weight, *weights, float(group["lr"]))

    def step(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]
    ) -> None:
        """See `Rule`."""
        (buffer,) = moments
        grad_factor, weight_decay, momentum, new_weight, gradient_weight, buffer_weight, lr = scalars
        regularized = grad.mul(grad_factor).add_(param.mul(weight_decay))
        buffer.mul_(momentum).add_(regularized.mul(new_weight))
        direction = regularized.mul(gradient_weight).add_(buffer.mul(buffer_weight))
        param.sub_(direction.mul_(lr))
