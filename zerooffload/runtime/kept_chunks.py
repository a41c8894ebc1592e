"""Reading what is kept on files, all of it: to verify it, and to bring home what lives in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerooffload.errors import CheckpointError, TierIOError
from zerooffload.runtime.resources import Parts
from zerooffload.telemetry import Wait, Waitable
from zerooffload.tiers import Block, NvmeBlock, Space, StagingRing, StagingSlot


@dataclass(frozen=True)
class _Reading:
    block: Block
    kept: NvmeBlock
    chunk: int
    record: torch.Tensor
    slot: StagingSlot
    read: Waitable


class KeptChunks:
    """Goes through chunks, several reads at once, in a staging ring that nobody else uses meanwhile."""

    def __init__(self, ring: StagingRing, parts: Parts) -> None:
        self._ring = ring
        self._parts = parts

    def take_up(self, blocks: Sequence[tuple[Block, NvmeBlock]]) -> None:
        """Compare every chunk's newest content with its checksum; of states that live in memory, bring it there.

        Raises
        ------
        CheckpointError
            If one is not what was written, or cannot be read.
        """
        chunks = ((block, kept, chunk) for block, kept in blocks for chunk in kept.kept_chunks)
        reading: deque[_Reading] = deque()
        try:
            for item in chunks:
                if not self._ring.num_free:
                    self._finish(reading.popleft())
                reading.append(self._start(*item))
            while reading:
                self._finish(reading.popleft())
            self._ring.drain(self._parts.waits)
        except TierIOError as error:
            raise CheckpointError(f"the run cannot be continued: {error}") from error
        finally:
            for left in reading:
                self._ring.release(left.slot, [left.read])
        accelerator = self._parts.accelerator
        self._parts.waits.order(Wait.STATE_COPY, accelerator.compute, accelerator.record(accelerator.copy_in))

    def _start(self, block: Block, kept: NvmeBlock, chunk: int) -> _Reading:
        slot = self._ring.acquire(self._parts.waits)
        record = slot.take(kept.layout.file_nbytes(chunk))
        return _Reading(block, kept, chunk, record, slot, kept.read_checked(chunk, record))

    def _finish(self, item: _Reading) -> None:
        leaving: list[Waitable] = []
        try:
            self._parts.waits.until(Wait.STATE_READ, item.read)
            if item.block.mirror is not None:
                record = item.block.view(Space.HOST, item.chunk)
                if record is None:
                    leaving.append(item.block.write(item.chunk, item.record))
                else:
                    record.copy_(item.record[: record.numel()])
        finally:
            self._ring.release(item.slot, leaving)
