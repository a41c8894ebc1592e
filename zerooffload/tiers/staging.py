"""A ring of host buffers through which records travel, and in which the last ones stay.

[Note: a slot is reusable when its content has left]
A slot that is released hands over what still reads or writes it (tickets, events). The ring gives slots out in the
order of their release and waits for those first. The ring holds the buffers, the operations hold the slots' tensors:
nothing is freed under an operation in flight.

[Note: the ring is the host's cache]
A record that was written home is still in its slot until the slot is taken for another. Host memory that the budget has
left makes the ring longer, so that more of them stay: who asks for a slot by the same key gets it back, and need not
read what the slot still holds. Writes go through at once, so the cache saves reads alone. Slots that hold nothing are
given out first, then those released longest ago.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from zerooffload.accelerator import Accelerator
from zerooffload.errors import InternalError
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Wait, Waitable, Waits, wait_for_all
from zerooffload.tiers.api import Block


class StagingSlot:
    """One buffer of the ring: uint8, 1D, page-aligned."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._taken_nbytes = 0
        self._versions: dict[int, int] = {}
        self.key: Hashable = None
        self.leaving: list[Waitable] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes` of the slot, `nbytes` a multiple of 4096."""
        start, self._taken_nbytes = self._taken_nbytes, self._taken_nbytes + nbytes
        if self._taken_nbytes > self._memory.numel():
            raise InternalError(f"a staging slot of {self._memory.numel()} bytes cannot hold {self._taken_nbytes}")
        return self._memory[start : self._taken_nbytes]

    def holds(self, block: Block, chunk: int) -> bool:
        """Whether the next bytes taken, taken as when `keep` was called, are the newest of that record."""
        version = block.version(chunk)
        return version is not None and self._versions.get(id(block)) == version

    def keep(self, block: Block, chunk: int) -> None:
        """The slot holds the newest of that record, of the chunk that is its key."""
        version = block.version(chunk)
        if version is not None:
            self._versions[id(block)] = version

    def reset(self, *, keeps: bool = False) -> None:
        """All of it is free again; with `keeps` its content stays what it is."""
        self._taken_nbytes = 0
        self.leaving = []
        if not keeps:
            self.key = None
            self._versions = {}


class StagingRing:
    """`num_slots` buffers of `slot_nbytes`, leased from the host's budget.

    Parameters
    ----------
    holder : str
        For the lease.
    num_slots : int
        That work needs.
    slot_nbytes : int
        Bytes of a slot, a multiple of 4096; 0 for a run that stages nothing.
    num_cached : int
        Further slots, so that more records stay.
    """

    def __init__(
        self,
        holder: str,
        num_slots: int,
        slot_nbytes: int,
        budget: Budget,
        accelerator: Accelerator,
        *,
        num_cached: int = 0,
    ) -> None:
        self.num_working = num_slots if slot_nbytes else 0
        self.num_slots = num_slots + num_cached if slot_nbytes else 0
        self._lease: Lease = budget.lease(ring_nbytes(num_slots + num_cached, slot_nbytes), holder)
        self._memory = [accelerator.host_buffer(slot_nbytes) for _ in range(self.num_slots)]
        # By order of release; the slots of a key can be found.
        self._empty = dict.fromkeys(StagingSlot(memory) for memory in self._memory)
        self._full: dict[Hashable, StagingSlot] = {}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of all slots; it stays where it is until the ring is closed."""
        return list(self._memory)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._empty) + len(self._full)

    def has_room(self, num_taken: int) -> bool:
        """Whether one who took `num_taken` may take another: of slots that hold something, only what work needs."""
        return bool(self._empty) or (bool(self._full) and num_taken < self.num_working)

    def acquire(self, waits: Waits, key: Hashable = None) -> StagingSlot:
        """The slot that holds the records of `key`, or another, once its content has left.

        The caller sees to it that one is free.
        """
        slot = self._full.get(key) if key is not None else None
        keeps = slot is not None
        slot = slot or next(iter(self._empty), None) or next(iter(self._full.values()), None)
        if slot is None:
            raise InternalError("no staging slot is free: one was taken twice or never released")
        try:
            wait_for_all(waits, Wait.STAGING_REUSE, slot.leaving)
        except BaseException:
            self._forget(slot)
            raise
        if slot.key is None:
            del self._empty[slot]
        else:
            del self._full[slot.key]
        slot.reset(keeps=keeps)
        slot.key = key
        return slot

    def release(self, slot: StagingSlot, leaving: Iterable[Waitable] = (), *, keeps: bool = False) -> None:
        """Give a slot back while `leaving` still uses it; with `keeps` its records can be had again by its key."""
        slot.leaving = list(leaving)
        if keeps and slot.key is not None:
            self._full[slot.key] = slot
        else:
            slot.key = None
            self._empty[slot] = None

    def drain(self, waits: Waits) -> None:
        """Wait until nothing is in flight from or to a free slot."""
        for slot in (*self._empty, *self._full.values()):
            try:
                wait_for_all(waits, Wait.STATE_WRITE, slot.leaving)
            except BaseException:
                self._forget(slot)
                raise
            slot.leaving = []

    def forget(self) -> None:
        """No slot holds a record any more that could be had again."""
        for slot in list(self._full.values()):
            self._full.pop(slot.key)
            slot.key = None
            self._empty[slot] = None

    def close(self) -> None:
        """Give the memory back; again is harmless."""
        self._empty.clear()
        self._full.clear()
        self._memory.clear()
        self._lease.release()

    def _forget(self, slot: StagingSlot) -> None:
        """What a transfer that failed was to bring or take is not there."""
        if slot.key is not None:
            self._full.pop(slot.key, None)
            self._empty[slot] = None
        slot.reset()


def ring_nbytes(num_slots: int, slot_nbytes: int) -> int:
    """What a ring takes from the host's budget."""
    return num_slots * slot_nbytes
