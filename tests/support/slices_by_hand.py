"""Plain PyTorch that runs blocks in checkpointed slices: what the product's slices must equal to the bit.

Gradients of what all slices share add up in the order in which autograd goes back: with two slices any order is the
same, with more the reference runs them from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerooffload.sharding.grouping import find_units


def in_slices_by_hand(size: int, *, backwards: bool = False) -> Callable[[nn.Module], None]:
    """Prepares a model: each block runs `size` samples at a time; `backwards`: the last first."""

    def prepare(model: nn.Module) -> None:
        for unit in find_units(model, "auto"):
            if unit.is_block:
                unit.module.forward = _Sliced(unit.module.forward, size, backwards=backwards)  # type: ignore[method-assign]

    return prepare


class _Sliced:
    def __init__(self, forward: Callable[..., Any], size: int, *, backwards: bool) -> None:
        self._forward, self._size, self._backwards = forward, size, backwards

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(hidden, *args, **kwargs)
        starts = range(0, len(hidden), self._size)
        parts: dict[int, Any] = {}
        for start in reversed(starts) if self._backwards else starts:
            rows = slice(start, start + self._size)

            def cut(value: Any, rows: slice = rows) -> Any:
                return value[rows] if isinstance(value, torch.Tensor) and len(value) == len(hidden) else value

            own = {name: cut(value) for name, value in kwargs.items()}
            parts[start] = checkpoint(
                self._forward, cut(hidden), *(cut(value) for value in args), use_reentrant=False, **own
            )
        in_order = [parts[start] for start in starts]
        if isinstance(in_order[0], torch.Tensor):
            return torch.cat(in_order)
        # Position biases, which are the same in all slices.
        return (torch.cat([part[0] for part in in_order]), *in_order[0][1:])
