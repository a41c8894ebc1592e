"""Taking a model's parameters over into their homes, chunk by chunk: no second copy of the model ever exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from zerooffload.optim.record import MASTER, REMAINDER
from zerooffload.optim.reference import split_master
from zerooffload.sharding.layout import FlatLayout
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Waits
from zerooffload.tiers import Block, NvmeBlock, Space, StagingRing

Views = Mapping[str, torch.Tensor]
Span = tuple[int, int]

_PIECE_NUMEL = 1 << 14
"""Masters that are split at once."""


class InitialStates:
    """Writes states that were never trained to their homes.

    Parameters
    ----------
    continues : bool
        Leave alone what is kept on files: it is an earlier run's, to be continued.
    """

    def __init__(self, ring: StagingRing, waits: Waits, *, continues: bool = False) -> None:
        self._ring = ring
        self._waits = waits
        self._continues = continues

    def write(self, part: UnitFlat) -> None:
        """Write a flat's parameters, as its module holds them now, and the state of an optimizer that never stepped."""
        values = [tensor.detach().reshape(-1) for tensor in part.flat.tensors]
        layout = part.flat.layout
        self._write_chunks(part.home, lambda views, span: _write_params(views, values, layout, span))
        if part.training is not None:
            record = part.training.optimizer
            self._write_chunks(record, lambda views, span: _write_record(views, values, layout, span))
            gradient = part.training.gradient
            if isinstance(gradient, NvmeBlock):
                self._write_chunks(gradient, lambda views, _: _zero(views))

    def finish(self) -> None:
        """Wait until everything is home."""
        self._ring.drain(self._waits)

    def _write_chunks(self, block: Block, write: Callable[[Views, Span], None]) -> None:
        """Let `write` set every chunk that a block holds, given its views and its elements of the flat buffer."""
        for chunk in block.layout.chunks:
            if self._continues and isinstance(block, NvmeBlock) and chunk in block.kept_chunks:
                continue
            span = block.layout.chunk_range(chunk)
            record = block.view(Space.HOST, chunk)
            if record is None:
                record = block.view(Space.DEVICE, chunk)
            if record is None:
                self._write_staged(block, chunk, span, write)
            else:
                write(block.layout.split(chunk, record), span)
            if block.mirror is not None and chunk in block.mirror.layout.chunks and not self._continues:
                self._write_staged(block.mirror, chunk, span, write)

    def _write_staged(self, block: Block, chunk: int, span: Span, write: Callable[[Views, Span], None]) -> None:
        slot = self._ring.acquire(self._waits)
        record = slot.take(block.layout.file_nbytes(chunk))
        write(block.layout.split(chunk, record), span)
        self._ring.release(slot, [block.initialize(chunk, record)])


def _write_params(views: Views, values: list[torch.Tensor], layout: FlatLayout, span: Span) -> None:
    (target,) = views.values()
    target.zero_()
    for source, place in _overlaps(layout, values, span):
        if layout.dtype is torch.bfloat16 and source.dtype is torch.float32:
            _split(source, param=target[place])
        else:
            target[place].copy_(source)


def _zero(views: Views) -> None:
    for view in views.values():
        view.zero_()


def _write_record(views: Views, values: list[torch.Tensor], layout: FlatLayout, span: Span) -> None:
    _zero(views)
    for source, place in _overlaps(layout, values, span):
        if REMAINDER.name in views and source.dtype is torch.float32:
            _split(source, remainder=views[REMAINDER.name][place])
        elif MASTER.name in views:
            views[MASTER.name][place].copy_(source)


def _split(master: torch.Tensor, *, param: torch.Tensor | None = None, remainder: torch.Tensor | None = None) -> None:
    """Write one half of an fp32 master; in pieces, because its temporaries take 24 bytes an element."""
    for start in range(0, master.numel(), _PIECE_NUMEL):
        piece = slice(start, start + _PIECE_NUMEL)
        halves = split_master(master[piece])
        for target, half in zip((param, remainder), halves, strict=True):
            if target is not None:
                target[piece].copy_(half)


def _overlaps(layout: FlatLayout, values: Iterable[torch.Tensor], span: Span) -> Iterator[tuple[torch.Tensor, slice]]:
    """The parts of parameters that lie in a span, and their places counted from the span's start."""
    start, stop = span
    for slot, value in zip(layout.slots, values, strict=True):
        low = max(slot.start, start)
        high = min(slot.stop, stop)
        if low < high:
            yield value[low - slot.start : high - slot.start], slice(low - start, high - start)
