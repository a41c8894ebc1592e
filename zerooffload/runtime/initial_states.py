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


def write_initial_states(part: UnitFlat, ring: StagingRing, waits: Waits) -> None:
    """Write a flat's parameters, as its module holds them now, and the state of an optimizer that never stepped."""
    values = [param.detach().reshape(-1) for param in part.flat.params]
    layout = part.flat.layout
    write_chunks(part.home, ring, waits, lambda views, start, stop: _write_params(views, values, layout, start, stop))
    if part.training is not None:
        write_chunks(
            part.training.optimizer,
            ring,
            waits,
            lambda views, start, stop: _write_record(views, values, layout, start, stop),
        )


def write_chunks(block: Block, ring: StagingRing, waits: Waits, write: Callable[[Views, int, int], None]) -> None:
    """Let `write(parts, start, stop)` set every chunk of a block, elements `[start, stop)`."""
    for chunk in range(block.layout.num_chunks):
        record, slot = block.view(Space.HOST, chunk), None
        if record is None:
            record = block.view(Space.DEVICE, chunk)
        if record is None:
            slot = ring.acquire(waits)
            record = slot.take(block.layout.file_nbytes(chunk))
        write(block.layout.split(chunk, record), *block.layout.chunk_range(chunk))
        if slot is not None:
            ring.release(slot, [block.write(chunk, record)])


def _write_params(views: Views, values: list[torch.Tensor], layout: FlatLayout, start: int, stop: int) -> None:
    (target,) = views.values()
    target.zero_()
    for slot, value in zip(layout.slots, values, strict=True):
        source, place = _overlap(slot, value, start, stop)
        if layout.dtype is torch.bfloat16 and source.dtype is torch.float32:
            source = split_master(source)[0]
        target[place].copy_(source)


def _write_record(views: Views, values: list[torch.Tensor], layout: FlatLayout, start: int, stop: int) -> None:
    for view in views.values():
        view.zero_()
    remainder = views.get(REMAINDER.name)
    if remainder is None:
        return
    for slot, value in zip(layout.slots, values, strict=True):
        source, place = _overlap(slot, value, start, stop)
        if source.dtype is torch.float32:
            remainder[place].copy_(split_master(source)[1])


def _overlap(slot: Slot, value: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, slice]:
    """The part of a parameter that lies in `[start, stop)`, and its place counted from `start`."""
    low = max(slot.start, start)
    high = max(low, min(slot.stop, stop))
    return value[low - slot.start : high - slot.start], slice(low - start, high - start)
