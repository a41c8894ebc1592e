"""The exact global gradient norm, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zerooffload.errors import ConfigError
from zerooffload.optim.kernels import norm_of
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, UnitFlat


@dataclass(frozen=True)
class Chosen:
    """Some parameters of a flat."""

    part: UnitFlat
    training: TrainingStates
    indices: tuple[int, ...]

    def with_gradient(self) -> list[int]:
        """Those of them that have a gradient."""
        return [
            index
            for index in self.indices
            if self.training.held[index] and isinstance(self.part.flat.params[index].grad, OffloadedGradient)
        ]


SquareSums = Callable[[UnitFlat, TrainingStates], list[torch.Tensor]]
ReadGradient = Callable[[UnitFlat, TrainingStates, int], torch.Tensor]


def total_norm(chosen: Sequence[Chosen], norm_type: float, square_sums: SquareSums, read: ReadGradient) -> float:
    """The norm of all chosen gradients as one vector.

    The 2-norm is exact up to the rounding of float64 sums over fixed blocks (see `reference.square_sums`) and does not
    depend on tiers, chunks or threads. Other norms are taken parameter by parameter in float64.
    """
    if norm_type <= 0:
        raise ConfigError(f"norm_type={norm_type}: expected a positive number or inf")
    sums: list[torch.Tensor] = []
    for item in chosen:
        indices = item.with_gradient()
        whole = len(indices) == sum(item.training.held)
        if norm_type == 2.0 and whole and all(item.training.grad_factors[index] == 1.0 for index in indices):
            if indices:
                sums += square_sums(item.part, item.training)
            continue
        for index in indices:
            factor = item.training.grad_factors[index]
            grad = read(item.part, item.training, index).double().abs().mul_(factor)
            sums.append(grad.max()[None] if math.isinf(norm_type) else grad.pow(norm_type).sum()[None])
    if math.isinf(norm_type):
        return max((float(value) for value in sums), default=0.0)
    if norm_type == 2.0:
        return norm_of(sums)
    return math.pow(math.fsum(float(value) for value in sums), 1.0 / norm_type)


def clip_factor(norm: float, max_norm: float) -> float:
    """Torch's factor, `min(1, max_norm / (norm + 1e-6))`, in double and rounded once to fp32."""
    ratio = max_norm / (norm + 1e-6)
    return float(np.float32(min(1.0, ratio)))


def scale(chosen: Sequence[Chosen], factor: float) -> None:
    """Let the update multiply the chosen gradients with `factor`."""
    for item in chosen:
        for index in item.with_gradient():
            item.training.grad_factors[index] = float(np.float32(item.training.grad_factors[index] * factor))
