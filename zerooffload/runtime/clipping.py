"""The exact global gradient norm, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zerooffload.errors import ConfigError
from zerooffload.optim.exact_sum import exact_sum
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.registry import residence_of
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


def choose(params: Iterable[torch.Tensor], run: object) -> list[Chosen]:
    """Those of these parameters that are trained, by flat.

    Raises
    ------
    ConfigError
        If one is not of that run.
    """
    indices: dict[UnitFlat, list[int]] = {}
    for param in params:
        residence = residence_of(param)
        if residence is None or residence.run is not run:
            raise ConfigError(
                f"zo.clip_grad_norm_ got a parameter of shape {tuple(param.shape)} that is not this model's"
            )
        if residence.part.training is not None:
            indices.setdefault(residence.part, []).append(residence.slot_index)
    return [
        Chosen(part, part.training, tuple(dict.fromkeys(chosen)))
        for part, chosen in indices.items()
        if part.training is not None
    ]


SquareSums = Callable[[UnitFlat, TrainingStates], list[torch.Tensor]]
ReadGradient = Callable[[UnitFlat, TrainingStates, int], torch.Tensor]


def norm_sum(chosen: Sequence[Chosen], norm_type: float, square_sums: SquareSums, read: ReadGradient) -> float:
    """The part of this rank in the norm of all chosen gradients as one vector: its sum before the root, or its largest.

    For the 2-norm, sums of squares over fixed blocks (see `reference.square_sums`) are added exactly, so that the norm
    does not depend on tiers, chunks or threads. Other norms are taken parameter by parameter in float64.

    Raises
    ------
    ConfigError
        If `norm_type` is no positive number.
    """
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type}: expected a positive number or inf")
    sums: list[torch.Tensor] = []
    for item in (item for item in chosen if item.part.flat.layout.counts):
        indices = item.with_gradient()
        whole = len(indices) == sum(item.training.held)
        factors = {item.training.grad_factors[index] for index in indices}
        if norm_type == 2.0 and whole and len(factors) <= 1:
            # An fp32 number's square is exact; with a power of two, as a loss scale is, the product is exact too.
            for factor in factors:
                sums += [part * factor**2 for part in square_sums(item.part, item.training)]
            continue
        for index in indices:
            grad = read(item.part, item.training, index).double().abs().mul_(item.training.grad_factors[index])
            if grad.numel():
                found = grad.max() if math.isinf(norm_type) else grad.pow(norm_type).sum()
                sums.append(found[None].cpu())
    values = torch.cat(sums) if sums else torch.zeros(1, dtype=torch.float64)
    return float(values.max()) if math.isinf(norm_type) else exact_sum(values)


def total_norm(parts: Sequence[float], norm_type: float) -> float:
    """The norm from every rank's `norm_sum`, added in rank order."""
    if math.isinf(norm_type):
        return max(parts)
    total = sum(parts)
    return math.sqrt(total) if norm_type == 2.0 else math.pow(total, 1.0 / norm_type)


def clip_factor(norm: float, max_norm: float) -> float:
    """Torch's factor, `min(1, max_norm / (norm + 1e-6))`, in double and rounded once to fp32."""
    ratio = max_norm / (norm + 1e-6)
    # In this order of arguments a NaN stays: as in torch, a NaN norm makes every gradient NaN.
    return float(np.float32(min(ratio, 1.0)))


def scale(chosen: Sequence[Chosen], factor: float) -> None:
    """Let the update multiply the chosen gradients with `factor`."""
    for item in chosen:
        for index in item.with_gradient():
            item.training.grad_factors[index] = float(np.float32(item.training.grad_factors[index] * factor))
