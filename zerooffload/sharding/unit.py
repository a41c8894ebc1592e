"""A unit: the parameters that move together, and where they are.

[Note: what a rank holds, and what it updates]
Of each state, a rank holds its shard of every flat buffer, or all shards: that is its block's `layout.shards`. Nobody
asks for a ZeRO stage. A rank updates the shards whose optimizer record it holds. If it holds more parameters than
that, the others are *copies*, current until the next update: the ranks then gather them, and each takes them home. If
ranks share one home, what they update is there when it is gathered, and each takes a part of the rest home: see
[Note: one host copy] in runtime/shared_homes.py.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zerooffload.accelerator import DeviceRange
from zerooffload.errors import InternalError
from zerooffload.formats import round_up
from zerooffload.sharding.flat import Flat
from zerooffload.sharding.layout import SLOT_ALIGNMENT_BYTES
from zerooffload.sharding.state import SHARD_TRANSITIONS, ShardState, StateMachine
from zerooffload.tiers import Block, Space


@dataclass(eq=False)
class TrainingStates:
    """What a trainable flat has beside its parameters.

    Attributes
    ----------
    optimizer, gradient : Block
        What this rank holds of the optimizer's record and of the gradient, at home.
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
        What this rank holds of the parameters.
    training : TrainingStates or None
        None for frozen parameters.
    range : DeviceRange or None
        Memory for the whole buffer while it is full; None where the home itself is usable by the device.
    collection : DeviceRange or None
        Memory for the whole buffer's gradients while they gather; None where their home is usable by the device.
    rank : int
        Whose shard is this rank's.
    sharers : tuple[int, ...]
        Ranks that have the home in one memory, this one among them, in order; none if no rank shares its own.
    copies_are_current : bool
        Whether parameters that the home holds and this rank does not update are those after the last update.
    """

    flat: Flat
    home: Block
    training: TrainingStates | None
    range: DeviceRange | None
    collection: DeviceRange | None
    rank: int = 0
    sharers: tuple[int, ...] = ()
    copies_are_current: bool = True

    @property
    def home_is_shared(self) -> bool:
        """Whether ranks have the home in one memory: this one with others, or others elsewhere."""
        return bool(self.sharers)

    @property
    def shard(self) -> builtins.range:
        """The shard that is this rank's."""
        return range(self.rank, self.rank + 1)

    @property
    def own(self) -> builtins.range:
        """The shards that this rank updates; of frozen parameters, those that it holds."""
        return (self.home if self.training is None else self.training.optimizer).layout.shards

    @property
    def own_chunks(self) -> builtins.range:
        """The chunks of these shards."""
        return self.home.layout.chunks_of(self.own)

    @property
    def first_chunks(self) -> builtins.range:
        """The chunks of the parameters whose first values this rank writes home."""
        chunks = self.home.layout.chunks
        return chunks[self.sharers.index(self.rank) :: len(self.sharers)] if self.home_is_shared else chunks

    @property
    def current_chunks(self) -> builtins.range:
        """The chunks of the parameters that are at home as they are after the last update."""
        return self.home.layout.chunks if self.copies_are_current else self.own_chunks

    @cached_property
    def copied_chunks(self) -> list[int]:
        """The chunks that the home holds and no rank updates that has it."""
        layout = self.home.layout
        updated = [self.own, *(range(rank, rank + 1) for rank in self.sharers)]
        here = {chunk for shards in updated for chunk in layout.chunks_of(shards)}
        return [chunk for chunk in layout.chunks if chunk not in here]

    def part_to_take_home(self, nbytes: int) -> slice:
        """The bytes of such a chunk that this rank takes home."""
        if not self.home_is_shared:
            return slice(0, nbytes)
        length = round_up(-(-nbytes // len(self.sharers)), SLOT_ALIGNMENT_BYTES)
        start = self.sharers.index(self.rank) * length
        return slice(min(start, nbytes), min(start + length, nbytes))

    @property
    def is_whole_at_home(self) -> bool:
        """Whether the home holds all parameters, as they are after the last update."""
        return len(self.home.layout.shards) == self.flat.layout.world_size and self.copies_are_current

    @property
    def memory(self) -> torch.Tensor:
        """The memory for the whole buffer that the device uses, uint8 1D: the range, or the home itself."""
        memory = self.home.whole(Space.DEVICE) if self.range is None else self.range.tensor
        if memory is None:
            raise InternalError(f"{self.flat.layout.name} has neither a usable home nor a range")
        return memory

    def place_of(self, chunk: int, memory: torch.Tensor) -> torch.Tensor:
        """Where a chunk of the parameters lies in memory for the whole buffer, uint8 1D, in whole blocks of a file."""
        start = self.home.layout.chunk_range(chunk)[0] * self.flat.layout.dtype.itemsize
        return memory[start : start + self.home.layout.file_nbytes(chunk)]

    @property
    def can_be_away(self) -> bool:
        """Whether there are times at which the device cannot use the parameters."""
        return self.range is not None or self.own != self.home.layout.shards

    def own_changed(self) -> None:
        """What the ranks update is new at home; copies, if the home holds any, are what it was before."""
        self.copies_are_current = self.own == self.home.layout.shards

    def bind(self) -> None:
        """Let the parameters show the memory for the whole buffer from now on, while they are full."""
        if self.range is None:
            self.flat.bind(self.memory)
            return
        # Views are only to be had of memory that is there; they stay when it goes.
        self.range.fill()
        try:
            self.flat.bind(self.memory)
        finally:
            self.range.empty()

    def show_at_home(self) -> None:
        """Let the parameters show what they are when nothing moves: values if the home can be used, else nothing."""
        if self.range is None and self.copies_are_current:
            self.flat.let_be_used()
            self.flat.show_full()
        else:
            self.flat.show_away()
            self.flat.watch_for_use()


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

    def leave_device(self) -> None:
        """Where the home is device memory, show nothing while that is left. The others are away already."""
        for part in self.parts:
            if part.home.needs_device:
                part.flat.show_away()
                part.flat.watch_for_use()

    def come_back_to_device(self) -> None:
        """Undo `leave_device`."""
        for part in self.parts:
            if part.home.needs_device and part.range is None:
                part.flat.let_be_used()
                part.flat.show_full()

    def parameters(self) -> list[torch.Tensor]:
        """All parameters."""
        return [param for part in self.parts for param in part.flat.params]


def trainable(unit: Unit) -> Iterable[tuple[UnitFlat, TrainingStates]]:
    """The flats of a unit that are trained."""
    for part in unit.parts:
        if part.training is not None:
            yield part, part.training
