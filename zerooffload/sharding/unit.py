"""A unit: the parameters that move together, and where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zerooffload.accelerator import DeviceRange
from zerooffload.errors import InternalError
from zerooffload.sharding.flat import Flat
from zerooffload.sharding.state import SHARD_TRANSITIONS, ShardState, StateMachine
from zerooffload.tiers import Block, Space


@dataclass(eq=False)
class TrainingStates:
    """What a trainable flat has beside its parameters.

    Attributes
    ----------
    optimizer, gradient : Block
        This rank's shard of the optimizer's record and of the gradient, at home.
    steps : list[int]
        For each parameter, how often it was updated.
    held : list[bool]
        For each parameter, whether the gradient's home holds one.
    grad_factors : list[float]
        For each parameter, what clipping wants its gradient multiplied with.
    """

    optimizer: Block
    gradient: Block
    steps: list[int]
    held: list[bool]
    grad_factors: list[float]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which the gradient's home holds it: the parameters' own, or fp32 where several backwards add up."""
        (part,) = self.gradient.layout.parts
        return part.dtype


def new_training_states(optimizer: Block, gradient: Block, num_params: int) -> TrainingStates:
    """Of a flat that was never trained."""
    return TrainingStates(optimizer, gradient, [0] * num_params, [False] * num_params, [1.0] * num_params)


@dataclass(eq=False)
class UnitFlat:
    """A flat buffer with the homes of its states.

    Attributes
    ----------
    home : Block
        This rank's shard of the parameters.
    training : TrainingStates or None
        None for frozen parameters.
    range : DeviceRange or None
        Memory for the whole buffer while it is full; None where the home itself is usable by the device.
    collection : DeviceRange or None
        Memory for the whole buffer's gradients while they gather; None where their home is usable by the device.
    """

    flat: Flat
    home: Block
    training: TrainingStates | None
    range: DeviceRange | None
    collection: DeviceRange | None
    rank: int = 0

    @property
    def shard_start(self) -> int:
        """The element of the flat buffer at which this rank's shard, and so the first chunk, starts."""
        return self.rank * self.flat.layout.shard_numel

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """The elements of the flat buffer that lie in a chunk of this rank's shard."""
        start, stop = self.home.layout.chunk_range(chunk)
        return self.shard_start + start, self.shard_start + stop

    def shard_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The part of memory for the whole buffer, uint8 1D, that is this rank's."""
        start = self.rank * self.flat.layout.shard_nbytes
        return (
            memory[start:]
            if self.flat.layout.world_size == 1
            else memory[start : start + self.flat.layout.shard_nbytes]
        )

    def show_at_home(self) -> None:
        """Let the parameters show what they are when nothing moves: values if the home can be used, else nothing."""
        memory = self.home.whole(Space.DEVICE) if self.range is None else self.range.tensor
        if memory is None:
            raise InternalError(f"{self.flat.layout.name} has neither a usable home nor a range")
        self.flat.bind(memory)
        if self.range is None:
            self.flat.show_full()
        else:
            self.flat.show_away()


class Unit:
    """A group of modules' own parameters with one state.

    Attributes
    ----------
    name : str
        Path of the module that it was cut at.
    parts : tuple[UnitFlat, ...]
    state : StateMachine[ShardState]
    range_nbytes : int
        Device memory taken while full, beyond the homes.
    """

    def __init__(self, name: str, parts: Sequence[UnitFlat]) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.state = StateMachine(f"unit {name}", ShardState.AT_HOME, SHARD_TRANSITIONS)

    @property
    def moving_parts(self) -> list[UnitFlat]:
        """The flats that the device cannot use at home."""
        return [part for part in self.parts if part.range is not None]

    @property
    def range_nbytes(self) -> int:
        """Device memory of the ranges while filled."""
        return sum(part.range.nbytes for part in self.parts if part.range is not None)

    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters."""
        return [param for part in self.parts for param in part.flat.params]


def trainable(unit: Unit) -> Iterable[tuple[UnitFlat, TrainingStates]]:
    """The flats of a unit that are trained."""
    for part in unit.parts:
        if part.training is not None:
            yield part, part.training
