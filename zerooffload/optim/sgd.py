"""`zo.SGD`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerooffload.optim.optimizer import OffloadedOptimizer, Params, outside
from zerooffload.optim.rules import RULES


class SGD(OffloadedOptimizer):
    """Stochastic gradient descent with momentum. Arguments as `torch.optim.SGD`'s."""

    RULE = RULES["sgd"]

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def out_of_range(self, group: dict[str, Any]) -> Iterable[str]:
        """See `OffloadedOptimizer`. Nesterov's form needs a momentum and no dampening."""
        wrong = group["nesterov"] and (not group["momentum"] or group["dampening"])
        return [*outside(group, "lr", "momentum", "weight_decay"), *(["nesterov"] if wrong else [])]
