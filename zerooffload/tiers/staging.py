"""A ring of host buffers through which records travel.

[Note: a slot is reusable when its content has left]
A slot that is released hands over what still reads or writes it (tickets, events). The ring gives slots out in the
order of their release and waits for those first. The ring holds the buffers, the operations hold the slots' tensors:
nothing is freed under an operation in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from zerooffload.accelerator import Accelerator
from zerooffload.errors import InternalError
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Wait, Waitable, Waits, wait_for_all


class StagingSlot:
    """One buffer of the ring: uint8, 1D, page-aligned."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._taken_nbytes = 0
        self.leaving: list[Waitable] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes` of the slot, `nbytes` a multiple of 4096."""
        start, self._taken_nbytes = self._taken_nbytes, self._taken_nbytes + nbytes
        if self._taken_nbytes > self._memory.numel():
            raise InternalError(f"a staging slot of {self._memory.numel()} bytes cannot hold {self._taken_nbytes}")
        return self._memory[start : self._taken_nbytes]

    def reset(self) -> None:
        """All of it is free again."""
        self._taken_nbytes = 0
        self.leaving = []


class StagingRing:
    """`num_slots` buffers of `slot_nbytes`, leased from the host's budget.

    Parameters
    ----------
    holder : str
        For the lease.
    slot_nbytes : int
        Bytes of a slot, a multiple of 4096; 0 for a run that stages nothing.
    """

    def __init__(self, holder: str, num_slots: int, slot_nbytes: int, budget: Budget, accelerator: Accelerator) -> None:
        self.num_slots = num_slots if slot_nbytes else 0
        self._lease: Lease = budget.lease(ring_nbytes(num_slots, slot_nbytes), holder)
        self._memory = [accelerator.host_buffer(slot_nbytes) for _ in range(self.num_slots)]
        self._free = deque(StagingSlot(memory) for memory in self._memory)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of all slots; it stays where it is until the ring is closed."""
        return list(self._memory)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def acquire(self, waits: Waits) -> StagingSlot:
        """The slot released longest ago, once its content has left. The caller sees to it that one is free."""
        if not self._free:
            raise InternalError("no staging slot is free: one was taken twice or never released")
        slot = self._free[0]
        try:
            wait_for_all(waits, Wait.STAGING_REUSE, slot.leaving)
        finally:
            slot.reset()
        return self._free.popleft()

    def release(self, slot: StagingSlot, leaving: Iterable[Waitable] = ()) -> None:
        """Give a slot back while `leaving` still uses it."""
        slot.leaving = list(leaving)
        self._free.append(slot)

    def drain(self, waits: Waits) -> None:
        """Wait until nothing is in flight from or to a free slot."""
        for slot in self._free:
            try:
                wait_for_all(waits, Wait.STATE_WRITE, slot.leaving)
            finally:
                slot.reset()

    def close(self) -> None:
        """Give the memory back; again is harmless."""
        self._free.clear()
        self._memory.clear()
        self._lease.release()


def ring_nbytes(num_slots: int, slot_nbytes: int) -> int:
    """What a ring takes from the host's budget."""
    return num_slots * slot_nbytes
