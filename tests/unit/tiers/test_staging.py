from __future__ import annotations

import pytest

from zerooffload import BudgetError, InternalError, TierIOError
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.memory import Budget
from zerooffload.telemetry import Waits
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import StagingRing
from zerooffload.tiers.staging import ring_nbytes

SLOT_BYTES = 8192


class Ticket:
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.fails:
            raise TierIOError("write", "/disk", 5)

    def done(self) -> bool:
        return bool(self.num_waits)


@pytest.fixture
def ring(budget: Budget, accelerator: CpuAccelerator) -> StagingRing:
    return StagingRing("staging ring", 3, SLOT_BYTES, budget, accelerator)


def test_a_ring_leases_its_slots_once_and_gives_them_back(ring: StagingRing, budget: Budget) -> None:
    assert budget.holders() == {"staging ring": 3 * SLOT_BYTES}
    assert ring_nbytes(3, SLOT_BYTES) == 3 * SLOT_BYTES
    ring.close()
    ring.close()
    assert budget.leased_bytes == 0


def test_a_ring_for_nothing_takes_nothing(budget: Budget, accelerator: CpuAccelerator, waits: Waits) -> None:
    ring = StagingRing("staging ring", 3, 0, budget, accelerator)
    assert (ring.num_slots, ring.num_free, budget.leased_bytes) == (0, 0, 0)
    with pytest.raises(InternalError, match="no staging slot"):
        ring.acquire(waits)


def test_a_ring_that_does_not_fit_is_refused(accelerator: CpuAccelerator) -> None:
    with pytest.raises(BudgetError, match="staging ring"):
        StagingRing("staging ring", 3, SLOT_BYTES, Budget("host", 3 * SLOT_BYTES - 1), accelerator)


def test_a_slot_is_cut_into_pieces_that_do_not_overlap(ring: StagingRing, waits: Waits) -> None:
    slot = ring.acquire(waits)
    first, second = slot.take(4096), slot.take(4096)
    assert first.data_ptr() % 4096 == 0
    assert second.data_ptr() == first.data_ptr() + 4096
    with pytest.raises(InternalError, match="cannot hold"):
        slot.take(4096)


def test_slots_come_back_in_the_order_of_their_release_when_their_content_has_left(
    ring: StagingRing, waits: Waits, recorder: CountingRecorder
) -> None:
    slots = [ring.acquire(waits) for _ in range(3)]
    tickets = [Ticket(), Ticket(), Ticket()]
    ring.release(slots[1], tickets[:2])
    ring.release(slots[0], tickets[2:])
    assert ring.acquire(waits) is slots[1]
    assert [ticket.num_waits for ticket in tickets] == [1, 1, 0]
    assert list(recorder.take()[1]) == ["staging reuse"]
    assert slots[1].take(SLOT_BYTES).numel() == SLOT_BYTES


def test_an_empty_ring_is_a_bug_that_is_told(ring: StagingRing, waits: Waits) -> None:
    held = [ring.acquire(waits) for _ in range(3)]
    assert (ring.num_free, len(held)) == (0, 3)
    with pytest.raises(InternalError, match="no staging slot"):
        ring.acquire(waits)


def test_draining_waits_for_everything_once(ring: StagingRing, waits: Waits) -> None:
    ticket = Ticket()
    ring.release(ring.acquire(waits), [ticket])
    ring.drain(waits)
    ring.drain(waits)
    assert ticket.num_waits == 1


def test_a_slot_whose_content_failed_to_leave_is_free_again(ring: StagingRing, waits: Waits) -> None:
    slots = [ring.acquire(waits) for _ in range(3)]
    ring.release(slots[0], [Ticket(fails=True)])
    with pytest.raises(TierIOError):
        ring.acquire(waits)
    assert ring.num_free == 1
