"""Copies of one parameter's states, to and from their homes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from zerooffload.runtime.resources import Parts
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.collectives import Collectives
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Wait, Waitable, wait_in_turn
from zerooffload.tiers import Block, Space, StagingRing

Views = Mapping[str, torch.Tensor]


class SlotAccess:
    """Records in reach one at a time: in place, or through the staging ring, which brings them to host memory.

    In place, too, is what the device updates, and what lies there for good: the ring has no slots for it.

    Parameters
    ----------
    wait_for_room : callable
        Sees to it that a slot of the ring is free.
    updates : UpdateQueue
        Nothing of it is under way while a record is in use here.
    before_change : callable
        Returns when a chunk of a block may be changed.

    Attributes
    ----------
    num_changed : int
        Records of which a home was changed, or may have been.
    """

    def __init__(
        self,
        ring: StagingRing,
        parts: Parts,
        wait_for_room: Callable[[], None],
        updates: UpdateQueue,
        before_change: Callable[[Block, int], None],
    ) -> None:
        self._before_change = before_change
        self._ring = ring
        self._parts = parts
        self._wait_for_room = wait_for_room
        self._updates = updates
        self.num_changed = 0

    def read(self, part: UnitFlat, block: Block, index: int, shards: range | None = None) -> dict[str, torch.Tensor]:
        """The piece of a parameter's record that lies in some shards, or that is this rank's: host tensors, 1D."""
        low, high = _piece(part, index, shards or part.own)
        layout = block.layout
        out = {item.name: torch.empty(item.num_items(high - low), dtype=item.dtype) for item in layout.parts}
        for chunk, here, there in _by_chunk(block, low, high):
            targets = layout.cut(out, there.start, there.stop)
            with self.record(block, chunk, update=False) as views:
                for name, view in layout.cut(views, here.start, here.stop).items():
                    targets[name].copy_(view)
        return out

    def write(self, part: UnitFlat, block: Block, index: int, pieces: Views) -> None:
        """Set the parts of a parameter's record that `pieces`, this rank's of them, 1D, names."""
        low, high = _piece(part, index, part.own)
        for chunk, here, there in _by_chunk(block, low, high):
            sources = block.layout.cut(pieces, there.start, there.stop)
            with self.record(block, chunk, update=True) as views:
                targets = block.layout.cut(views, here.start, here.stop)
                for name, source in sources.items():
                    targets[name].copy_(source)

    @contextmanager
    def record(self, block: Block, chunk: int, *, update: bool) -> Iterator[dict[str, torch.Tensor]]:
        """The parts of a chunk, in host memory or in place; with `update`, what is changed in them goes home."""
        if update:
            self._updates.drop_ahead()
        self._updates.wait_idle()
        if update:
            self._before_change(block, chunk)
        record = self._in_place(block, chunk)
        if record is not None:
            self.num_changed += update
            yield block.layout.split(chunk, record)
            if update and block.mirror is not None:
                self._copy_to(block.mirror, chunk, record)
            return
        self._wait_for_room()
        slot = self._ring.acquire(self._parts.waits)
        record = slot.take(block.layout.file_nbytes(chunk))
        in_flight: list[Waitable] = [block.read(chunk, record)]
        try:
            wait_in_turn(self._parts.waits, Wait.STATE_READ, in_flight)
            yield block.layout.split(chunk, record)
            if update:
                self.num_changed += 1
                in_flight = [item.write(chunk, record) for item in (block, block.mirror) if item is not None]
                wait_in_turn(self._parts.waits, Wait.STATE_WRITE, in_flight)
                accelerator = self._parts.accelerator
                copied = accelerator.record(accelerator.copy_in)
                self._parts.waits.order(Wait.STATE_COPY, accelerator.compute, copied)
        finally:
            self._ring.release(slot, in_flight)

    def _in_place(self, block: Block, chunk: int) -> torch.Tensor | None:
        """A record that is copied where it is."""
        record = block.view(Space.HOST, chunk)
        if record is None and self._ring.slot_nbytes < block.layout.file_nbytes(chunk):
            # Copied by compute, as whatever else happens to it there is.
            record = block.view(Space.DEVICE, chunk)
        return record

    def copy_again(self, block: Block) -> None:
        """What is in memory was changed there: let the copy on files, if there is one, follow."""
        for chunk in block.mirror.layout.chunks if block.mirror is not None else ():
            with self.record(block, chunk, update=True):
                pass

    def _copy_to(self, mirror: Block, chunk: int, record: torch.Tensor) -> None:
        self._wait_for_room()
        slot = self._ring.acquire(self._parts.waits)
        copy = slot.take(mirror.layout.file_nbytes(chunk))
        in_flight: list[Waitable] = []
        try:
            copy[: record.numel()].copy_(record)
            in_flight.append(mirror.write(chunk, copy))
            wait_in_turn(self._parts.waits, Wait.STATE_WRITE, in_flight)
        finally:
            self._ring.release(slot, in_flight)


def own_piece(part: UnitFlat, index: int, whole: torch.Tensor) -> torch.Tensor:
    """The piece, 1D, of something shaped like a parameter, that is this rank's."""
    low, high = _piece(part, index, part.own)
    start = part.flat.layout.slots[index].start
    return whole.reshape(-1)[low - start : high - start]


def join_pieces(collectives: Collectives, part: UnitFlat, index: int, piece: Views) -> dict[str, torch.Tensor]:
    """A parameter's record joined from all ranks, shaped like the parameter. Collective."""
    is_whole = len(part.own) == part.flat.layout.world_size
    pieces = [piece] if is_whole else collectives.gather_of_shards(dict(piece))
    shape = part.flat.layout.slots[index].param.shape
    return {name: torch.cat([other[name] for other in pieces]).view(shape) for name in piece}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare by: the bytes' own equality, in which NaN equals itself and -0.0 differs from 0.0."""
    if not tensor.is_floating_point():
        return tensor.detach()
    return tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.int8}[tensor.dtype.itemsize])


def _piece(part: UnitFlat, index: int, shards: range) -> tuple[int, int]:
    """The elements of the flat buffer that are both a parameter's and of these shards."""
    slot, shard_numel = part.flat.layout.slots[index], part.flat.layout.shard_numel
    low = max(slot.start, shards.start * shard_numel)
    return low, max(low, min(slot.stop, shards.stop * shard_numel))


def _by_chunk(block: Block, low: int, high: int) -> Iterator[tuple[int, slice, slice]]:
    """Elements `[low, high)` of the flat buffer cut by chunks: chunk, place in the chunk, place counted from `low`."""
    for chunk in block.layout.chunks:
        start, stop = block.layout.chunk_range(chunk)
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield chunk, slice(first - start, last - start), slice(first - low, last - low)
