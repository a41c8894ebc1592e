"""`zo.AdamW` and `zo.Adam`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerooffload.optim.optimizer import OffloadedOptimizer, Params, betas_outside, outside
from zerooffload.optim.rules import RULES


class AdamW(OffloadedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019) for the parameters of an offloaded model.

    Arguments, param groups and `state_dict` are those of `torch.optim.AdamW`. Each operation is rounded once, in the
    order `g *= factor; p *= 1 - lr*wd; m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*(g*g);
    d = sqrt(v)*(1/sqrt(1-b2^t)) + eps; p -= (lr/(1-b1^t)) * (m/d)`, on every tier and CPU alike, so results are
    bit-equal wherever states live.

    Parameters
    ----------
    params : iterable
        Parameters of a model that `zo.offload` was called on, or param groups of them.
    lr : float or torch.Tensor
        A tensor is read when `step()` is called.

    Raises
    ------
    ConfigError
        See `OffloadedOptimizer`.
    """

    RULE = RULES["adamw"]

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        )

    def out_of_range(self, group: dict[str, Any]) -> Iterable[str]:
        """See `OffloadedOptimizer`."""
        return [*outside(group, "lr", "eps", "weight_decay"), *betas_outside(group)]


class Adam(AdamW):
    """Adam (Kingma and Ba, 2015); `weight_decay` is added to the gradient (L2). Arguments as `torch.optim.Adam`'s."""

    RULE = RULES["adam"]

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
