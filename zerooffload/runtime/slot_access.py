"""Copies of one parameter's states, to and from their homes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from zerooffload.runtime.resources import Parts
from zerooffload.sharding.layout import Slot
from zerooffload.telemetry import Wait
from zerooffload.tiers import Block, Space, StagingRing

Views = Mapping[str, torch.Tensor]


class SlotAccess:
    """Brings records to host memory one at a time, through the staging ring where they are elsewhere.

    Parameters
    ----------
    wait_for_room : callable
        Sees to it that a slot of the ring is free.
    """

    def __init__(self, ring: StagingRing, parts: Parts, wait_for_room: Callable[[], None]) -> None:
        self._ring = ring
        self._parts = parts
        self._wait_for_room = wait_for_room

    def read(self, block: Block, slot: Slot) -> dict[str, torch.Tensor]:
        """The parts of a parameter's record: host tensors of the parameter's shape."""
        out = {part.name: torch.empty(slot.param.numel, dtype=part.dtype) for part in block.layout.parts}
        for chunk, here, there in _pieces(block, slot):
            with self.record(block, chunk, update=False) as views:
                for name, view in views.items():
                    out[name][there].copy_(view[here])
        return {name: value.view(slot.param.shape) for name, value in out.items()}

    def write(self, block: Block, slot: Slot, values: Views) -> None:
        """Set the parts of a parameter's record that `values` names."""
        for chunk, here, there in _pieces(block, slot):
            with self.record(block, chunk, update=True) as views:
                for name, value in values.items():
                    views[name][here].copy_(value.reshape(-1)[there])

    @contextmanager
    def record(self, block: Block, chunk: int, *, update: bool) -> Iterator[dict[str, torch.Tensor]]:
        """The parts of a chunk in host memory; with `update`, what is changed in them goes home."""
        record = block.view(Space.HOST, chunk)
        if record is not None:
            yield block.layout.split(chunk, record)
            return
        self._wait_for_room()
        slot = self._ring.acquire(self._parts.waits)
        record = slot.take(block.layout.file_nbytes(chunk))
        read = block.read(chunk, record)
        in_flight = [read]
        try:
            self._parts.waits.until(Wait.STATE_READ, read)
            yield block.layout.split(chunk, record)
            if update:
                write = block.write(chunk, record)
                in_flight = [write]
                self._parts.waits.until(Wait.STATE_WRITE, write)
                accelerator = self._parts.accelerator
                copied = accelerator.record(accelerator.copy_in)
                self._parts.waits.order(Wait.STATE_COPY, accelerator.compute, copied)
        finally:
            self._ring.release(slot, in_flight)


def _pieces(block: Block, slot: Slot) -> Iterator[tuple[int, slice, slice]]:
    """A parameter cut by chunks: chunk, place in the chunk, place in the parameter."""
    layout = block.layout
    if slot.start == slot.stop:
        return
    for chunk in range(slot.start // layout.chunk_numel, (slot.stop - 1) // layout.chunk_numel + 1):
        start, stop = layout.chunk_range(chunk)
        low, high = max(slot.start, start), min(slot.stop, stop)
        yield chunk, slice(low - start, high - start), slice(low - slot.start, high - slot.start)
