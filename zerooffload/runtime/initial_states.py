"""Taking a model's parameters over into their homes, chunk by chunk: no second copy of the model ever exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zerooffload.optim.record import REMAINDER
from zerooffload.optim.reference import split_master
from zerooffload.sharding.layout import FlatLayout, Slot
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Waits
from zerooffload.tiers import Block, Space, StagingRing

Views = Mapping[str, torch.Tensor]
Span = tuple[int, int]


class InitialStates:
    """Writes states that were never trained to their homes."""

    def __init__(self, ring: StagingRing, waits: Waits) -> None:
        self._ring = ring
        self._waits = waits

    def write(self, part: UnitFlat) -> None:
        """Write a flat's parameters, as its module holds them now, and the state of an optimizer that never stepped."""
        values = [param.detach().reshape(-1) for param in part.flat.params]
        layout = part.flat.layout
        self._write_chunks(part, part.home, lambda views, span: _write_params(views, values, layout, span))
        if part.training is not None:
            record = part.training.optimizer
            self._write_chunks(part, record, lambda views, span: _write_record(views, values, layout, span))

    def finish(self) -> None:
        """Wait until everything is home."""
        self._ring.drain(self._waits)

    def _write_chunks(self, part: UnitFlat, block: Block, write: Callable[[Views, Span], None]) -> None:
        """Let `write` set every chunk of this rank's shard, given its views and its elements of the flat buffer."""
        for chunk in range(block.layout.num_chunks):
            record, slot = block.view(Space.HOST, chunk), None
            if record is None:
                record = block.view(Space.DEVICE, chunk)
            if record is None:
                slot = self._ring.acquire(self._waits)
                record = slot.take(block.layout.file_nbytes(chunk))
            write(block.layout.split(chunk, record), part.chunk_span(chunk))
            if slot is not None:
                self._ring.release(slot, [block.write(chunk, record)])


def _write_params(views: Views, values: list[torch.Tensor], layout: FlatLayout, span: Span) -> None:
    (target,) = views.values()
    target.zero_()
    for slot, value in zip(layout.slots, values, strict=True):
        source, place = _overlap(slot, value, span)
        if layout.dtype is torch.bfloat16 and source.dtype is torch.float32:
            source = split_master(source)[0]
        target[place].copy_(source)


def _write_record(views: Views, values: list[torch.Tensor], layout: FlatLayout, span: Span) -> None:
    for view in views.values():
        view.zero_()
    remainder = views.get(REMAINDER.name)
    if remainder is None:
        return
    for slot, value in zip(layout.slots, values, strict=True):
        source, place = _overlap(slot, value, span)
        if source.dtype is torch.float32:
            remainder[place].copy_(split_master(source)[1])


def _overlap(slot: Slot, value: torch.Tensor, span: Span) -> tuple[torch.Tensor, slice]:
    """The part of a parameter that lies in a span, and its place counted from the span's start."""
    start, stop = span
    low = max(slot.start, start)
    high = max(low, min(slot.stop, stop))
    return value[low - slot.start : high - slot.start], slice(low - start, high - start)
