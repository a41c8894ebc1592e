"""The states of offloaded parameters as logical tensors: by parameter, state and element, wherever they live.

[Note: what a rank holds of a logical tensor]
A parameter has states: "param", and the parts of its optimizer's record. Counted row by row, a rank stands for the
elements `[start, stop)` of all of them that lie in its shard of the flat buffer: all ranks together for each element
once, whatever the stage. Replicas of a hybrid mesh stand for the same ones. What a rank stands for passes by in
*state chunks*, each the same elements of every state of a flat buffer, so nothing larger is ever held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from zerooffload.checkpoint.boxes import Box
from zerooffload.memory import Budget
from zerooffload.optim.record import MASTER, REMAINDER
from zerooffload.optim.reference import join_master
from zerooffload.runtime.resources import Parts
from zerooffload.sharding.layout import ParamSpec
from zerooffload.sharding.unit import Unit, UnitFlat
from zerooffload.telemetry import Wait, Waitable, Waits, wait_in_turn
from zerooffload.tiers import Block, Part, Space, StagingRing, StagingSlot

Views = Mapping[str, torch.Tensor]

PARAM = "param"
"""The state that is the parameter itself."""
HOLDER = "staging of checkpoints"
"""Who leases the ring."""
NUM_SLOTS = 2
"""Chunks that are under way at once: one is used, the other is read or written."""


EXACT_STATES = frozenset({PARAM, REMAINDER.name, MASTER.name})
"""What `exact_values` takes, of those that a parameter has."""


@dataclass(frozen=True)
class HeldParam:
    """A parameter, and what of it this rank stands for: see [Note: what a rank holds of a logical tensor].

    Attributes
    ----------
    param : ParamSpec
    dtype : torch.dtype
        The compute dtype.
    trainable : bool
    counts : bool
        Whether no other part of a model that is cut has it too, or only later ones.
    states : tuple[Part, ...]
        `PARAM`, then the parts of the optimizer's record.
    start, stop : int
        Elements; none if they are equal.
    num_steps : int
        How often it was updated.
    """

    param: ParamSpec
    dtype: torch.dtype
    trainable: bool
    counts: bool
    states: tuple[Part, ...]
    start: int
    stop: int
    num_steps: int


@dataclass(frozen=True)
class Piece:
    """The elements `[start, stop)` of a parameter in a state chunk, and their place, counted from the chunk's start."""

    param: ParamSpec
    start: int
    stop: int
    place: slice


@dataclass(frozen=True)
class StateChunk:
    """The same elements of every state of a flat buffer: one chunk of each of its blocks."""

    part: UnitFlat
    number: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The homes of the states: the parameters', then the optimizer record's if they are trained."""
        training = self.part.training
        return (self.part.home,) if training is None else (self.part.home, training.optimizer)

    @property
    def states(self) -> tuple[Part, ...]:
        """The states."""
        return _states(self.part)

    @property
    def needs_device(self) -> bool:
        """Whether it can be read and written by the thread that trains alone."""
        return any(block.needs_device for block in self.blocks)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The parameters' elements in it, in the order of the flat buffer; padding belongs to none."""
        begin, end = self.part.home.layout.chunk_range(self.number)
        pieces = []
        for slot in self.part.flat.layout.slots:
            low, high = max(slot.start, begin), min(slot.stop, end)
            if low < high:
                place = slice(low - begin, high - begin)
                pieces.append(Piece(slot.param, low - slot.start, high - slot.start, place))
        return tuple(pieces)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Those of its pieces; where no padding is between them, of several at once."""
        places: list[slice] = []
        for piece in self.pieces:
            if places and places[-1].stop == piece.place.start:
                places[-1] = slice(places[-1].start, piece.place.stop)
            else:
                places.append(piece.place)
        return tuple(places)

    def cut(self, views: Views, place: slice) -> dict[str, torch.Tensor]:
        """Of views of its states, what belongs to the elements at a place: items, 1D, by state."""
        cut = (block.layout.cut(views, place.start, place.stop) for block in self.blocks)
        return {name: view for of_block in cut for name, view in of_block.items()}


def held_params(units: Iterable[Unit]) -> list[HeldParam]:
    """What this rank stands for, in the order in which state chunks pass by."""
    held = []
    for part in _parts(units):
        layout = part.flat.layout
        begin, end = (shard * layout.shard_numel for shard in (part.rank, part.rank + 1))
        for index, slot in enumerate(layout.slots):
            low = max(slot.start, begin)
            high = max(low, min(slot.stop, end))
            start = min(low - slot.start, slot.param.numel)
            num_steps = 0 if part.training is None else part.training.steps[index]
            held.append(
                HeldParam(
                    param=slot.param,
                    dtype=layout.dtype,
                    trainable=layout.trainable,
                    counts=layout.counts,
                    states=_states(part),
                    start=start,
                    stop=start + high - low,
                    num_steps=num_steps,
                )
            )
    return held


def state_chunks(units: Iterable[Unit]) -> list[StateChunk]:
    """All that hold elements that this rank stands for, in the order of the homes."""
    chunks = (StateChunk(part, number) for part in _parts(units) for number in part.home.layout.chunks_of(part.shard))
    return [chunk for chunk in chunks if chunk.pieces]


def owned_chunks(units: Iterable[Unit]) -> list[StateChunk]:
    """All that no other rank brings to this one, in the order of the homes: also what each rank holds whole."""
    return [StateChunk(part, number) for part in _parts(units) for number in part.own_chunks]


def box_of(param: ParamSpec) -> Box:
    """What a rank has of a parameter: all of it, but of one that tensor parallelism has cut."""
    return Box.of_all(param.shape) if param.cut is None else Box(param.cut.shape, param.cut.offsets, param.shape)


def runs_in_whole(piece: Piece) -> Iterator[tuple[int, slice]]:
    """Where in all of a parameter a piece's elements lie: the first of each run of them, and its place in the chunk."""
    begin = piece.place.start - piece.start
    for first, start, numel in box_of(piece.param).places(piece.start, piece.stop):
        yield first, slice(begin + start, begin + start + numel)


def exact_values(items: Views) -> torch.Tensor:
    """A parameter's elements as exactly as it has them: those of its fp32 master, if there is one."""
    if REMAINDER.name in items:
        return join_master(items[PARAM], items[REMAINDER.name])
    return items.get(MASTER.name, items[PARAM])


class LogicalStates:
    """Reads and writes state chunks, in host memory: those that lie there in place, others through a staging ring.

    For one thread at a time; where `needs_device` says so of a chunk's block, for the one that trains. While a chunk is
    read or written here, nobody else changes it. A context manager: at its end the ring is given back.

    Parameters
    ----------
    chunks : Sequence[StateChunk]
        Those that may be read or written.
    budget : Budget
        The host's; `num_slots` chunks, without what the host can address in place, are leased from it.
    states : Collection[str], optional
        The states that are wanted; default: all.
    ring : StagingRing, optional
        Nobody else uses it meanwhile: it serves where its slots are large enough, and nothing is leased then.

    Raises
    ------
    BudgetError
        If the ring does not fit.
    """

    def __init__(
        self,
        chunks: Sequence[StateChunk],
        budget: Budget,
        parts: Parts,
        *,
        states: Collection[str] | None = None,
        num_slots: int = NUM_SLOTS,
        ring: StagingRing | None = None,
    ) -> None:
        self._parts = parts
        self._states = states
        slot_nbytes = max(
            (sum(self._staged_nbytes(block, chunk) for block in self._blocks(chunk)) for chunk in chunks), default=0
        )
        self._is_borrowed = ring is not None and ring.slot_nbytes >= slot_nbytes
        if ring is None or not self._is_borrowed:
            ring = StagingRing(HOLDER, num_slots, slot_nbytes, budget, parts.accelerator)
        self._ring = ring

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the ring back, once nothing is under way in it."""
        try:
            self._ring.drain(self._parts.waits)
        finally:
            if not self._is_borrowed:
                self._ring.close()

    def read(self, chunks: Iterable[StateChunk]) -> Iterator[ChunkReading]:
        """Each chunk, whose views hold until the next one is asked for, and what is `leaving` then is over.

        The next ones are taken from `chunks`, and their reads begun, as far as the ring has room.

        Raises
        ------
        TierIOError
            If one cannot be read.
        """
        begun: deque[ChunkReading] = deque()
        upcoming = iter(chunks)
        try:
            while True:
                while not begun or (len(begun) < NUM_SLOTS and self.has_room):
                    chunk = next(upcoming, None)
                    if chunk is None:
                        break
                    begun.append(self.begin(chunk))
                if not begun:
                    return
                yield begun[0]
                self.release(begun.popleft())
        finally:
            for reading in begun:
                self.release(reading)

    @property
    def has_room(self) -> bool:
        """Whether another chunk may be begun."""
        return not self._ring.num_slots or self._ring.num_free > 0

    def begin(self, chunk: StateChunk) -> ChunkReading:
        """Start to read a chunk."""
        reading = ChunkReading(chunk, self._parts.waits)
        for block in self._blocks(chunk):
            record = block.view(Space.HOST, chunk.number)
            if record is None:
                record = self._take(reading, block)
                reading.reads.append(block.read(chunk.number, record))
            reading.records.append((block, record))
        return reading

    def release(self, reading: ChunkReading) -> None:
        """Its views are not used any more."""
        if reading.slot is not None:
            self._ring.release(reading.slot, [*reading.reads, *reading.leaving])

    def write(self, chunk: StateChunk, fill: Callable[[Views], None]) -> None:
        """Let `fill` set the views of a chunk's states, padding included, and take them home.

        Views that lie elsewhere than at home hold anything before.

        Raises
        ------
        TierIOError
            If it cannot be written.
        """
        reading, number = ChunkReading(chunk, self._parts.waits), chunk.number
        leaving: list[Waitable] = []
        try:
            staged = []
            for block in self._blocks(chunk):
                record = block.view(Space.HOST, number)
                if record is None:
                    record = self._take(reading, block)
                    staged.append((block, record))
                reading.records.append((block, record))
            fill(reading.views())
            leaving += [block.write(number, record) for block, record in staged]
            for block, record in reading.records:
                if block.mirror is not None and number in block.mirror.layout.chunks:
                    leaving.append(self._write_copy(reading, block.mirror, record))
        finally:
            if reading.slot is not None:
                self._ring.release(reading.slot, leaving)

    def finish(self) -> None:
        """Return when everything that was written is home.

        Raises
        ------
        TierIOError
            If something could not be written.
        """
        self._ring.drain(self._parts.waits)

    def _write_copy(self, reading: ChunkReading, mirror: Block, record: torch.Tensor) -> Waitable:
        copy = self._take(reading, mirror)
        copy[: record.numel()].copy_(record)
        return mirror.write(reading.chunk.number, copy)

    def _take(self, reading: ChunkReading, block: Block) -> torch.Tensor:
        if reading.slot is None:
            reading.slot = self._ring.acquire(self._parts.waits)
        return reading.slot.take(block.layout.file_nbytes(reading.chunk.number))

    def _blocks(self, chunk: StateChunk) -> list[Block]:
        """Those of the wanted states."""
        wanted = self._states
        return [
            block for block in chunk.blocks if wanted is None or any(part.name in wanted for part in block.layout.parts)
        ]

    def _staged_nbytes(self, block: Block, chunk: StateChunk) -> int:
        nbytes = block.layout.file_nbytes(chunk.number)
        return nbytes * ((block.view(Space.HOST, chunk.number) is None) + (block.mirror is not None))


class ChunkReading:
    """A chunk on its way to host memory.

    Attributes
    ----------
    chunk : StateChunk
    leaving : list[Waitable]
        What still reads its views when it is released.
    """

    def __init__(self, chunk: StateChunk, waits: Waits) -> None:
        self.chunk = chunk
        self.records: list[tuple[Block, torch.Tensor]] = []
        self.reads: list[Waitable] = []
        self.leaving: list[Waitable] = []
        self.slot: StagingSlot | None = None
        self._waits = waits

    def views(self) -> dict[str, torch.Tensor]:
        """Its states, once they are there: 1D, `[items of the chunk]`, by name."""
        wait_in_turn(self._waits, Wait.STATE_READ, self.reads)
        return {
            name: view
            for block, record in self.records
            for name, view in block.layout.split(self.chunk.number, record).items()
        }


def _parts(units: Iterable[Unit]) -> Iterator[UnitFlat]:
    for unit in units:
        yield from unit.parts


def _states(part: UnitFlat) -> tuple[Part, ...]:
    record = () if part.training is None else part.training.optimizer.layout.parts
    return (*part.home.layout.parts, *record)
