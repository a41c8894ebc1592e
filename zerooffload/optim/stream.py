"""The streamed update: chunks are read, stepped and written, several in flight at once.

Of each chunk, what its home lets the kernel address is updated in place; the rest passes through a slot of the staging
ring. Who drives the stream says in which order: see runtime/update_queue.py.

[Note: reads run ahead as far as they can]
All slots but one hold chunks that are read or stepped; the write of the chunk before those has the last one. So the
drive has reads left to do all the while that a chunk is stepped and its checksums are taken. With half of the ring
ahead it could run out of them: on a drive of 5 GB/s that cost 2 to 6 % of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from zerooffload.errors import ZeroOffloadError
from zerooffload.optim.kernels import Kernels, Old
from zerooffload.optim.rules import StepScalars
from zerooffload.optim.spans import Span
from zerooffload.telemetry import Recorder, Wait, Waitable, Waits, Work
from zerooffload.tiers import Block, RecordLayout, Space, StagingRing, StagingSlot


@dataclass(frozen=True)
class ChunkUpdate:
    """A chunk to be updated.

    Attributes
    ----------
    param, optimizer, gradient : Block
        The homes of its states.
    first_index : int
        Of its first element in the flat buffer.
    spans : sequence of Span
        Counted from the chunk's start.
    ahead : bool
        Write the new states beside the old ones, which count until the blocks are told otherwise.
    gradient_written : Waitable or None
        What must be over before the gradient can be read from its home.
    name : str
        Of the flat buffer.
    """

    param: Block
    optimizer: Block
    gradient: Block
    chunk: int
    first_index: int
    spans: Sequence[Span[StepScalars]]
    ahead: bool = False
    gradient_written: Waitable | None = None
    name: str = ""

    @property
    def space(self) -> Space:
        """Where it is updated: on the device if all states are there and none in the host's reach, else on the host."""
        blocks = (self.param, self.optimizer, self.gradient)
        if any(block.view(Space.HOST, self.chunk) is not None for block in blocks):
            return Space.HOST
        on_device = all(block.view(Space.DEVICE, self.chunk) is not None for block in blocks)
        return Space.DEVICE if on_device else Space.HOST


@dataclass(frozen=True)
class ChunkWrites:
    """What takes an updated chunk home: its parameters, none where they were updated in place, and everything else."""

    param: Sequence[Waitable] = ()
    others: Sequence[Waitable] = ()


@dataclass
class _Staged:
    """A chunk whose states are in reach, or on their way."""

    update: ChunkUpdate
    space: Space
    urgency: int
    records: list[torch.Tensor] = field(default_factory=list)
    reads: list[Waitable] = field(default_factory=list)
    param_writes: list[Waitable] = field(default_factory=list)
    other_writes: list[Waitable] = field(default_factory=list)
    writes_back: list[tuple[Block, torch.Tensor]] = field(default_factory=list)
    # Of records that are updated beside their old ones, these; the others themselves.
    old_records: list[torch.Tensor] = field(default_factory=list)
    slot: StagingSlot | None = None


class StreamedUpdate:
    """Takes chunks through a staging ring, a few at a time, in the order in which they are staged.

    For one thread at a time.

    Parameters
    ----------
    kernels : Mapping[Space, Kernels]
        The arithmetic for each space.
    before_change : callable
        Returns when a chunk of a block may be changed.
    """

    def __init__(
        self,
        kernels: dict[Space, Kernels],
        ring: StagingRing,
        waits: Waits,
        recorder: Recorder,
        *,
        before_change: Callable[[Block, int], None] = lambda _block, _chunk: None,
    ) -> None:
        self._before_change = before_change
        self._kernels = kernels
        self._ring = ring
        self._waits = waits
        self._recorder = recorder
        self._staged: deque[_Staged] = deque()

    @property
    def num_staged(self) -> int:
        """Chunks whose states are in reach, or on their way."""
        return len(self._staged)

    @property
    def has_room(self) -> bool:
        """Whether another chunk may be staged; see [Note: reads run ahead as far as they can]."""
        return len(self._staged) < max(1, self._ring.num_working - 1)

    def stage(self, update: ChunkUpdate, urgency: int = 0) -> None:
        """Begin to bring a chunk's states into reach.

        Parameters
        ----------
        urgency : int
            Where it comes in the order in which somebody waits for what is updated: the least first.

        Raises
        ------
        TierIOError
            If a transfer could not be begun, or an earlier one of the slot's has failed.
        """
        self._before_change(update.param, update.chunk)
        staged = _Staged(update, update.space, urgency)
        try:
            for block, is_updated in ((update.param, True), (update.optimizer, True), (update.gradient, False)):
                old, new = self._bring(staged, block, is_updated=is_updated)
                staged.old_records.append(old)
                staged.records.append(new)
        except BaseException:
            self._abandon(staged)
            raise
        self._staged.append(staged)

    def finish_first(self) -> ChunkWrites:
        """Update the chunk that was staged first, and begin to take it home.

        Raises
        ------
        TierIOError
            If a state could not be read, or a write not begun: the states are the old ones still, or some of each.
        """
        staged = self._staged.popleft()
        try:
            for read in staged.reads:
                self._waits.until(Wait.STATE_READ, read)
            update = staged.update
            with self._recorder.working(Work.UPDATE_KERNEL, f"{update.name} #{update.chunk}"):
                self._step(staged)
            for block, record in staged.writes_back:
                writes = staged.param_writes if block is update.param else staged.other_writes
                writes.append(self._write(update, block, record))
            self._copy(staged)
        except BaseException:
            self._abandon(staged)
            raise
        if staged.slot is not None:
            for block, _ in staged.writes_back:
                staged.slot.keep(block, staged.update.chunk)
            writes = [*staged.param_writes, *staged.other_writes]
            self._ring.release(staged.slot, writes, keeps=True, urgency=staged.urgency)
        return ChunkWrites(staged.param_writes, staged.other_writes)

    def lend(self, param: Block, chunk: int, use: Callable[[torch.Tensor], Waitable]) -> bool:
        """Let `use` read the parameters of a chunk, uint8 `[file_nbytes]`, where their last update has left them.

        False if they are not there any more, or were in place.
        """
        return self._ring.lend(_key(param, chunk), param, chunk, use)

    def can_lend(self, param: Block, chunk: int) -> bool:
        """Whether `lend` would find them."""
        return self._ring.can_lend(_key(param, chunk), param, chunk)

    def abandon_first(self) -> None:
        """Leave the chunk that was staged first as it is."""
        self._abandon(self._staged.popleft())

    def abandon(self) -> None:
        """Leave every chunk that is staged as it is. Buffers outlive what is in flight."""
        while self._staged:
            self.abandon_first()

    def settle(self) -> None:
        """After a failure: return when nothing that was begun is under way any more."""
        for _ in range(self._ring.num_slots):
            with suppress(ZeroOffloadError):
                self._ring.drain(self._waits)
                break
        # What was stepped is in the slots, but is not to count.
        self._ring.forget()

    def _bring(self, staged: _Staged, block: Block, *, is_updated: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The record of a state, and where the new one will be: in place, beside it, or in the ring.

        There its read is under way.
        """
        update = staged.update
        record = block.view(staged.space, update.chunk)
        if record is not None:
            return record, block.view_ahead(update.chunk) if update.ahead and is_updated else record
        slot = self._slot_of(staged)
        record = slot.take(block.layout.file_nbytes(update.chunk))
        if not slot.holds(block, update.chunk):
            if update.gradient_written is not None and block is update.gradient:
                self._waits.until(Wait.GRADIENT_WRITE, update.gradient_written)
            staged.reads.append(block.read(update.chunk, record))
        if is_updated:
            staged.writes_back.append((block, record))
        return record, record

    def _slot_of(self, staged: _Staged) -> StagingSlot:
        """The chunk's slot of the ring, taken when it is first needed."""
        if staged.slot is None:
            update = staged.update
            staged.slot = self._ring.acquire(self._waits, key=_key(update.param, update.chunk))
        return staged.slot

    def _write(self, update: ChunkUpdate, block: Block, record: torch.Tensor) -> Waitable:
        return block.write_ahead(update.chunk, record) if update.ahead else block.write(update.chunk, record)

    def _step(self, staged: _Staged) -> None:
        update, kernels = staged.update, self._kernels[staged.space]
        blocks = (update.param, update.optimizer, update.gradient)
        params, record, grads = (
            block.layout.split(update.chunk, raw) for block, raw in zip(blocks, staged.records, strict=True)
        )
        (param,), (grad,) = params.values(), grads.values()
        old = self._old(staged)
        for span in update.spans:
            part = slice(span.start, span.stop)
            own = update.optimizer.layout.cut(record, span.start, span.stop)
            before = old and Old(old.param[part], update.optimizer.layout.cut(old.record, span.start, span.stop))
            kernels.step(span.settings, param[part], own, grad[part], update.first_index + span.start, old=before)

    def _old(self, staged: _Staged) -> Old | None:
        """The old values, if a record is updated beside them; what no span covers is copied."""
        update = staged.update
        layouts = (update.param.layout, update.optimizer.layout)
        pairs = list(zip(layouts, staged.old_records, staged.records, strict=False))
        if all(old is new for _, old, new in pairs):
            return None
        views = []
        for layout, old, new in pairs:
            views.append(layout.split(update.chunk, old))
            if old is not new:
                _copy_uncovered(layout, update, views[-1], layout.split(update.chunk, new))
        (param,) = views[0].values()
        return Old(param, views[1])

    def _copy(self, staged: _Staged) -> None:
        """Let copies on files follow what was updated."""
        update = staged.update
        for block, record in zip((update.param, update.optimizer), staged.records, strict=False):
            if block.mirror is None:
                continue
            copy = record
            if all(record is not staged_record for _, staged_record in staged.writes_back):
                copy = self._slot_of(staged).take(block.layout.file_nbytes(update.chunk))
                if staged.space is Space.HOST:
                    copy[: record.numel()].copy_(record)
                else:
                    self._waits.until(Wait.STATE_COPY, block.read(update.chunk, copy))
            staged.other_writes.append(block.mirror.write(update.chunk, copy))

    def _abandon(self, staged: _Staged) -> None:
        if staged.slot is not None:
            self._ring.release(staged.slot, [*staged.reads, *staged.param_writes, *staged.other_writes])


def _key(param: Block, chunk: int) -> Hashable:
    return id(param), chunk


def _copy_uncovered(
    layout: RecordLayout, update: ChunkUpdate, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> None:
    """Copy what lies between the spans: padding, and parameters that are not updated."""
    start, stop = layout.chunk_range(update.chunk)
    edges = [0, *(edge for span in update.spans for edge in (span.start, span.stop)), stop - start]
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        for part in layout.parts:
            # An item that elements of a span share with those behind it is the span's.
            place = slice(part.num_items(low), part.num_items(high))
            new[part.name][place].copy_(old[part.name][place])
