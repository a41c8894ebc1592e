"""A ring of host buffers through which records travel, and in which the last ones stay.

[Note: a slot is reusable when its content has left]
A slot that is released hands over what still reads or writes it (tickets, events). The ring gives slots out in the
order of their release and waits for those first. The ring holds the buffers, the operations hold the slots' tensors:
nothing is freed under an operation in flight.

[Note: the ring is the host's cache]
A record that was written home is still in its slot until the slot is taken for another. Host memory that the budget has
left makes the ring longer, so that more of them stay: who asks for a slot by the same key gets it back, and need not
read what the slot still holds. Writes go through at once, so the cache saves reads alone. Slots that hold nothing are
given out first, then new ones while there may be more, then those released longest ago. Memory for further slots is
taken when they are first needed, and given up when somebody else needs the budget.

Records that are asked for in the same order again and again are all equally far away when they are released, so any
set that stays saves as many reads (Belady 1966), and the others make do with the slots that work needs. Those stay for
which somebody waits soonest: their update need not wait for a read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable

import torch

from zerooffload.accelerator import Accelerator
from zerooffload.errors import InternalError
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Wait, Waitable, Waits, wait_for_all
from zerooffload.tiers.api import Block

CACHE_HOLDER = "cache of updated chunks"


class StagingSlot:
    """One buffer of the ring: uint8, 1D, page-aligned."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._taken_nbytes = 0
        self._versions: dict[int, int] = {}
        self.key: Hashable = None
        self.urgency = 0
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

    def first(self, nbytes: int) -> torch.Tensor:
        """The bytes that were taken first."""
        return self._memory[:nbytes]

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

    Attributes
    ----------
    goes_round : bool
        Records are asked for in the same order again and again, not there and back; see the note.
    slot_nbytes : int
        Bytes of a slot.
    buffers : list[torch.Tensor]
        The memory of the slots that work needs; it stays where it is until the ring is closed.
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
        self.goes_round = False
        self.num_working = num_slots if slot_nbytes else 0
        self.num_slots = self.num_working + (num_cached if slot_nbytes else 0)
        self.slot_nbytes = slot_nbytes
        self._accelerator = accelerator
        self._leases: list[Lease] = [budget.lease(ring_nbytes(num_slots, slot_nbytes), holder)]
        # For who asks for memory while another thread stages. Reentrant: garbage collection may release a lease.
        self._lock = threading.RLock()
        # By order of release; the slots of a key can be found.
        self._empty: dict[StagingSlot, None] = {}
        self._full: dict[Hashable, StagingSlot] = {}
        self._num_made = 0
        self.buffers = [self._make_slot() for _ in range(self.num_working)]
        if self.num_slots > self.num_working:
            self._leases.append(budget.lease(ring_nbytes(num_cached, slot_nbytes), CACHE_HOLDER))
            budget.ask_when_short(self._give_up)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._empty) + len(self._full) + self._num_unmade

    @property
    def _num_unmade(self) -> int:
        return self.num_slots - self._num_made

    def has_room(self, num_taken: int) -> bool:
        """Whether one who took `num_taken` may take another: of slots that hold something, only what work needs."""
        return bool(self._empty) or (self.num_free > 0 and num_taken < self.num_working)

    @property
    def is_ready(self) -> bool:
        """Whether the slot that `acquire` gives without a key can be used at once."""
        with self._lock:
            slot = self._first_free()
            if slot is None:
                return self._num_unmade > 0
            return all(item.done() for item in slot.leaving)

    def acquire(self, waits: Waits, key: Hashable = None) -> StagingSlot:
        """The slot that holds the records of `key`, or another, once its content has left.

        The caller sees to it that one is free.
        """
        with self._lock:
            slot = self._full.pop(key, None) if key is not None else None
            keeps = slot is not None
            if slot is None and not self._empty and self._num_unmade:
                self._make_slot()
            slot = slot or self._take_free()
        try:
            wait_for_all(waits, Wait.STAGING_REUSE, slot.leaving)
        except BaseException:
            # What a transfer that failed was to bring or take is not there.
            slot.reset()
            self._empty[slot] = None
            raise
        slot.reset(keeps=keeps)
        slot.key = key
        return slot

    def lend(self, key: Hashable, block: Block, chunk: int, use: Callable[[torch.Tensor], Waitable]) -> bool:
        """Let `use` read a record that was taken first, uint8 `[file_nbytes]`, while its slot stays in the ring.

        False if the newest of that record is in no slot, or in one that somebody holds.
        """
        with self._lock:
            slot = self._full.get(key)
            if slot is None or not slot.holds(block, chunk):
                return False
            slot.leaving.append(use(slot.first(block.layout.file_nbytes(chunk))))
            return True

    def can_lend(self, key: Hashable, block: Block, chunk: int) -> bool:
        """Whether `lend` would find it."""
        with self._lock:
            slot = self._full.get(key)
            return slot is not None and slot.holds(block, chunk)

    def _first_free(self) -> StagingSlot | None:
        """An empty slot, or the full one that goes first; see [Note: the ring is the host's cache]."""
        if self._empty or not self._full:
            return next(iter(self._empty), None)
        num_staying = min(self.num_slots - self.num_working, len(self._full) - 1) if self.goes_round else 0
        by_urgency = sorted(self._full.values(), key=lambda slot: slot.urgency) if num_staying else []
        staying = set(by_urgency[:num_staying])
        return next(slot for slot in self._full.values() if slot not in staying)

    def _take_free(self) -> StagingSlot:
        slot = self._first_free()
        if slot is None:
            raise InternalError("no staging slot is free: one was taken twice or never released")
        if slot in self._empty:
            del self._empty[slot]
        else:
            del self._full[slot.key]
        return slot

    def release(
        self, slot: StagingSlot, leaving: Iterable[Waitable] = (), *, keeps: bool = False, urgency: int = 0
    ) -> None:
        """Give a slot back while `leaving` still uses it.

        Parameters
        ----------
        keeps : bool
            Its records can be had again by its key.
        urgency : int
            Of these records: where they come in the order in which somebody waits for them.
        """
        slot.leaving = list(leaving)
        slot.urgency = urgency
        with self._lock:
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
        with self._lock:
            for slot in list(self._full.values()):
                self._full.pop(slot.key)
                slot.key = None
                self._empty[slot] = None

    def close(self) -> None:
        """Give the memory back; again is harmless."""
        self._empty.clear()
        self._full.clear()
        self.buffers.clear()
        self.num_slots = self._num_made = 0
        for lease in self._leases:
            lease.release()

    def _make_slot(self) -> torch.Tensor:
        memory = self._accelerator.host_buffer(self.slot_nbytes)
        self._empty[StagingSlot(memory)] = None
        self._num_made += 1
        return memory

    def _give_up(self, nbytes: int) -> None:
        """Shrink the cache by so many bytes, as far as it can."""
        with self._lock:
            wanted = min(-(-nbytes // self.slot_nbytes), self.num_slots - self.num_working)
            for slot in [slot for slot in self._full.values() if all(item.done() for item in slot.leaving)]:
                if self._num_unmade >= wanted or self._num_made <= self.num_working:
                    break
                del self._full[slot.key]
                self._num_made -= 1
            given = min(wanted, self._num_unmade)
            self.num_slots -= given
        self._leases[-1].shrink(ring_nbytes(given, self.slot_nbytes))

    def _forget(self, slot: StagingSlot) -> None:
        """What a transfer that failed was to bring or take is not there."""
        if slot.key is not None:
            self._full.pop(slot.key, None)
            self._empty[slot] = None
        slot.reset()


def ring_nbytes(num_slots: int, slot_nbytes: int) -> int:
    """What a ring takes from the host's budget."""
    return num_slots * slot_nbytes
