"""The streamed update: chunks are read, stepped and written, several in flight at once.

Of each chunk, what its home lets the kernel address is updated in place; the rest passes through a slot of the staging
ring. The order of chunks is turned around in every step: those that were updated last are still in the ring, and need
not be read (see tiers/staging.py).

[Note: reads run ahead as far as they can]
All slots but one hold chunks that are read or stepped; the write of the chunk before those has the last one. So the
drive has reads left to do all the while that a chunk is stepped and its checksums are taken. With half of the ring
ahead it could run out of them: on a drive of 5 GB/s that cost 2 to 6 % of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from zerooffload.errors import TierIOError
from zerooffload.optim.kernels import Kernels
from zerooffload.optim.rules import StepScalars
from zerooffload.optim.spans import Span
from zerooffload.telemetry import Recorder, Wait, Waitable, Waits, Work
from zerooffload.tiers import Block, Space, StagingRing, StagingSlot


@dataclass(frozen=True)
class ChunkUpdate:
    """A chunk to be updated: the homes of its states, and its spans counted from the chunk's start.

    `first_index` is that of its first element in the flat buffer.
    """

    param: Block
    optimizer: Block
    gradient: Block
    chunk: int
    first_index: int
    spans: Sequence[Span[StepScalars]]

    @property
    def space(self) -> Space:
        """Where it is updated: on the device if all states are there and none in the host's reach, else on the host."""
        blocks = (self.param, self.optimizer, self.gradient)
        if any(block.view(Space.HOST, self.chunk) is not None for block in blocks):
            return Space.HOST
        on_device = all(block.view(Space.DEVICE, self.chunk) is not None for block in blocks)
        return Space.DEVICE if on_device else Space.HOST


@dataclass
class _Staged:
    """A chunk whose states are in reach, or on their way."""

    update: ChunkUpdate
    space: Space
    records: list[torch.Tensor] = field(default_factory=list)
    reads: list[Waitable] = field(default_factory=list)
    writes_back: list[tuple[Block, torch.Tensor]] = field(default_factory=list)
    slot: StagingSlot | None = None


class StreamedUpdate:
    """Runs chunk updates through a staging ring.

    Parameters
    ----------
    kernels : Mapping[Space, Kernels]
        The arithmetic for each space.
    """

    def __init__(self, kernels: dict[Space, Kernels], ring: StagingRing, waits: Waits, recorder: Recorder) -> None:
        self._kernels = kernels
        self._ring = ring
        self._waits = waits
        self._recorder = recorder

    def run(self, updates: Iterable[ChunkUpdate]) -> None:
        """Update every chunk; returns when all states are home.

        Raises
        ------
        TierIOError
            If a state could not be read or written: the states of the chunks before are new, those after it old.
        """
        depth = max(1, self._ring.num_working - 1)
        staged: deque[_Staged] = deque()
        try:
            for update in updates:
                if len(staged) == depth:
                    self._finish(staged.popleft())
                staged.append(self._stage(update))
            while staged:
                self._finish(staged.popleft())
        except BaseException:
            # Buffers must outlive what is in flight, whatever went wrong.
            for item in staged:
                self._abandon(item)
            raise
        self._ring.drain(self._waits)

    def settle(self) -> None:
        """After a failure: return when nothing that was begun is under way any more."""
        for _ in range(self._ring.num_slots):
            with suppress(TierIOError):
                self._ring.drain(self._waits)
                break
        # What was stepped is in the slots, but is not to count.
        self._ring.forget()

    def _stage(self, update: ChunkUpdate) -> _Staged:
        staged = _Staged(update, update.space)
        for block, is_updated in ((update.param, True), (update.optimizer, True), (update.gradient, False)):
            record = block.view(staged.space, update.chunk)
            if record is None:
                slot = self._slot_of(staged)
                record = slot.take(block.layout.file_nbytes(update.chunk))
                if not slot.holds(block, update.chunk):
                    staged.reads.append(block.read(update.chunk, record))
                if is_updated:
                    staged.writes_back.append((block, record))
            staged.records.append(record)
        return staged

    def _slot_of(self, staged: _Staged) -> StagingSlot:
        """The chunk's slot of the ring, taken when it is first needed."""
        if staged.slot is None:
            update = staged.update
            staged.slot = self._ring.acquire(self._waits, key=(id(update.param), update.chunk))
        return staged.slot

    def _finish(self, staged: _Staged) -> None:
        try:
            for read in staged.reads:
                self._waits.until(Wait.STATE_READ, read)
            with self._recorder.working(Work.UPDATE_KERNEL):
                self._step(staged)
            writes = [block.write(staged.update.chunk, record) for block, record in staged.writes_back]
            writes += self._copy(staged)
        except BaseException:
            self._abandon(staged)
            raise
        if staged.slot is not None:
            for block, _ in staged.writes_back:
                staged.slot.keep(block, staged.update.chunk)
            self._ring.release(staged.slot, writes, keeps=True)

    def _step(self, staged: _Staged) -> None:
        update, kernels = staged.update, self._kernels[staged.space]
        blocks = (update.param, update.optimizer, update.gradient)
        params, record, grads = (
            block.layout.split(update.chunk, raw) for block, raw in zip(blocks, staged.records, strict=True)
        )
        (param,), (grad,) = params.values(), grads.values()
        for span in update.spans:
            part = slice(span.start, span.stop)
            own = update.optimizer.layout.cut(record, span.start, span.stop)
            kernels.step(span.settings, param[part], own, grad[part], update.first_index + span.start)

    def _copy(self, staged: _Staged) -> list[Waitable]:
        """Let copies on files follow what was updated."""
        update, writes = staged.update, []
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
            writes.append(block.mirror.write(update.chunk, copy))
        return writes

    def _abandon(self, staged: _Staged) -> None:
        if staged.slot is not None:
            self._ring.release(staged.slot, staged.reads)
