"""Records read into staging slots before the device has room for them: a slow tier is read further ahead."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

from zerooffload.errors import ZeroOffloadError
from zerooffload.telemetry import Waitable, Waits
from zerooffload.tiers import Block, StagingRing, StagingSlot


class Settled:
    """A transfer that is waited for, whatever becomes of it."""

    def __init__(self, ticket: Waitable) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        """Until the transfer has ended."""
        with suppress(ZeroOffloadError):
            self._ticket.wait()

    def done(self) -> bool:
        """Whether it has."""
        return self._ticket.done()


@dataclass(frozen=True)
class StagedRecord:
    """A record in a staging slot, or on its way there."""

    slot: StagingSlot
    record: torch.Tensor
    ticket: Waitable


def read_into_slot(ring: StagingRing, waits: Waits, home: Block, chunk: int) -> StagedRecord:
    """Begin to read a record into a slot of the ring, of which one is free."""
    slot = ring.acquire(waits)
    try:
        record = slot.take(home.layout.file_nbytes(chunk))
        return StagedRecord(slot, record, home.read(chunk, record))
    except BaseException:
        ring.release(slot)
        raise


class ReadAhead:
    """Keeps records that were read early. They count as long as nothing was written to their homes since."""

    def __init__(self, ring: StagingRing, waits: Waits) -> None:
        self._ring = ring
        self._waits = waits
        self._early: dict[tuple[Block, int], tuple[StagedRecord, int | None]] = {}

    def __len__(self) -> int:
        """Slots that are taken."""
        return len(self._early)

    def has_room(self, num_taken: int) -> bool:
        """Whether a record could be read now, without waiting, where others have taken `num_taken` slots."""
        return self._ring.has_room(num_taken + len(self)) and self._ring.is_ready

    def begin(self, home: Block, chunks: Iterable[int], num_taken: int) -> bool:
        """Begin to read what is not there yet; False if slots were short, of which others have taken `num_taken`.

        Waits for nothing.
        """
        for chunk in chunks:
            if (home, chunk) in self._early:
                continue
            if not self.has_room(num_taken):
                return False
            version = home.version(chunk)
            try:
                self._early[home, chunk] = read_into_slot(self._ring, self._waits, home, chunk), version
            except ZeroOffloadError:
                # Who needs the record tries again, and is told.
                return False
        return True

    def has(self, home: Block, chunk: int) -> bool:
        """Whether the record was read early, or is being read."""
        return (home, chunk) in self._early

    def take(self, home: Block, chunk: int) -> StagedRecord | None:
        """The newest record, if it was read early; the caller releases its slot."""
        staged, version = self._early.pop((home, chunk), (None, None))
        if staged is not None and version != home.version(chunk):
            self._release(staged)
            return None
        return staged

    def give_up_last(self) -> bool:
        """Free a slot, of what is needed last; False if none is held."""
        if not self._early:
            return False
        _, (staged, _) = self._early.popitem()
        self._release(staged)
        return True

    def drop(self) -> None:
        """Free all slots."""
        while self.give_up_last():
            pass

    def _release(self, staged: StagedRecord) -> None:
        # The slot waits for the transfer when it is taken again.
        self._ring.release(staged.slot, [Settled(staged.ticket)])
