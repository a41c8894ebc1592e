"""`zo.Adagrad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerooffload.optim.optimizer import OffloadedOptimizer, Params, outside
from zerooffload.optim.rules import RULES


class Adagrad(OffloadedOptimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011). Arguments as `torch.optim.Adagrad`'s."""

    RULE = RULES["adagrad"]

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def out_of_range(self, group: dict[str, Any]) -> Iterable[str]:
        """See `OffloadedOptimizer`."""
        return outside(group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
