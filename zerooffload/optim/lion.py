"""`zo.Lion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerooffload.optim.optimizer import OffloadedOptimizer, Params, betas_outside, outside
from zerooffload.optim.rules import RULES


class Lion(OffloadedOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2): one moment.

    The paper takes a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by as much.
    """

    RULE = RULES["lion"]

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def out_of_range(self, group: dict[str, Any]) -> Iterable[str]:
        """See `OffloadedOptimizer`."""
        return [*outside(group, "lr", "weight_decay"), *betas_outside(group)]
