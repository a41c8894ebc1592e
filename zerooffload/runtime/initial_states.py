"""Taking a model's parameters over into their homes, chunk by chunk: no second copy of the model ever exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from zerooffload.checkpoint.stored_tensor import StoredTensor
from zerooffload.optim.record import MASTER, REMAINDER
from zerooffload.optim.reference import split_master
from zerooffload.runtime.initial_values import InitialValues, StoredValues, ValuesInMemory
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
    stored : Mapping[str, StoredTensor]
        By name, the parameters whose values are read from there. Those of the others are the tensors themselves.
    continues : bool
        Leave alone what is kept on files: it is an earlier run's, to be continued.
    """

    def __init__(
        self, ring: StagingRing, waits: Waits, stored: Mapping[str, StoredTensor], *, continues: bool = False
    ) -> None:
        self._ring = ring
        self._waits = waits
        self._stored = stored
        self._continues = continues

    def write(self, part: UnitFlat) -> None:
        """Write a flat's parameters, as they are now, and the state of an optimizer that never stepped."""
        layout = part.flat.layout
        values = [
            self._values(slot.param.name, tensor) for slot, tensor in zip(layout.slots, part.flat.tensors, strict=True)
        ]
        self._write_chunks(part.home, lambda views, span: _write_params(views, values, layout, span), part.first_chunks)
        if part.training is not None:
            record = part.training.optimizer
            self._write_chunks(record, lambda views, span: _write_record(views, values, layout, span))
            gradient = part.training.gradient
            if isinstance(gradient, NvmeBlock):
                self._write_chunks(gradient, lambda views, _: _zero(views))

    def _values(self, name: str, param: torch.Tensor) -> InitialValues:
        return StoredValues(self._stored[name]) if name in self._stored else ValuesInMemory(param)

    def finish(self) -> None:
        """Wait until everything is home."""
        self._ring.drain(self._waits)

    def _write_chunks(self, block: Block, write: Callable[[Views, Span], None], chunks: range | None = None) -> None:
        """Let `write` set chunks that a block holds, or all, given its views and its elements of the flat buffer."""
        for chunk in block.layout.chunks if chunks is None else chunks:
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


def _write_params(views: Views, values: list[InitialValues], layout: FlatLayout, span: Span) -> None:
    (target,) = views.values()
    target.zero_()
    for source, first, place in _overlaps(layout, values, span):
        if layout.dtype is torch.bfloat16 and source.dtype is not torch.bfloat16:
            _split(source, first, target[place], 0)
        else:
            source.copy_to(target[place], first)


def _zero(views: Views) -> None:
    for view in views.values():
        view.zero_()


def _write_record(views: Views, values: list[InitialValues], layout: FlatLayout, span: Span) -> None:
    _zero(views)
    for source, first, place in _overlaps(layout, values, span):
        if REMAINDER.name in views and source.dtype is not torch.bfloat16:
            _split(source, first, views[REMAINDER.name][place], 1)
        elif MASTER.name in views:
            source.copy_to(views[MASTER.name][place], first)


def _split(source: InitialValues, first: int, target: torch.Tensor, half: int) -> None:
    """Write a half (0: upper, 1: lower) of fp32 masters; in pieces: their temporaries take 24 bytes an element."""
    done = 0
    for values in source.pieces(first, first + target.numel()):
        for piece in values.split(_PIECE_NUMEL):
            target[done : done + piece.numel()].copy_(split_master(piece.float())[half])
            done += piece.numel()


def _overlaps(
    layout: FlatLayout, values: Iterable[InitialValues], span: Span
) -> Iterator[tuple[InitialValues, int, slice]]:
    """The parameters that lie in a span: values, the first of them there, and their place in the span."""
    start, stop = span
    for slot, value in zip(layout.slots, values, strict=True):
        low = max(slot.start, start)
        high = min(slot.stop, stop)
        if low < high:
            yield value, low - slot.start, slice(low - start, high - start)
