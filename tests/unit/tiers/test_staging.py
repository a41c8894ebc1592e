from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
    assert list(recorder.take().waits) == ["staging reuse"]
    assert slots[1].take(SLOT_BYTES).numel() == SLOT_BYTES


def test_a_ring_is_ready_when_the_content_of_its_next_slot_has_left(ring: StagingRing, waits: Waits) -> None:
    slots = [ring.acquire(waits) for _ in range(3)]
    assert not ring.is_ready
    writes = [Ticket(), Ticket()]
    for slot, write in zip(slots, writes, strict=False):
        ring.release(slot, [write])
    writes[1].wait()
    assert not ring.is_ready
    writes[0].wait()
    assert ring.is_ready


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


class Versioned:
    """A block whose records change when it says so."""

    layout = SimpleNamespace(file_nbytes=lambda _: 4096)

    def __init__(self, *, is_known: bool = True) -> None:
        self.number = 0
        self.is_known = is_known

    def version(self, _chunk: int) -> int | None:
        return self.number if self.is_known else None


def filled(ring: StagingRing, waits: Waits, key: int, *blocks: Versioned, leaving: tuple[Ticket, ...] = ()) -> int:
    """Bring the records of `key` into a slot and release it; where it is."""
    slot = ring.acquire(waits, key)
    address = slot.take(4096).data_ptr()
    for block in blocks:
        slot.keep(block, key)  # type: ignore[arg-type]
    ring.release(slot, leaving, keeps=True)
    return address


def test_a_slot_that_is_asked_for_by_its_key_still_holds_its_records(ring: StagingRing, waits: Waits) -> None:
    block = Versioned()
    addresses = {key: filled(ring, waits, key, block) for key in (1, 2, 3)}
    slot = ring.acquire(waits, 2)
    assert slot.take(4096).data_ptr() == addresses[2]
    assert slot.holds(block, 2)  # type: ignore[arg-type]
    block.number += 1
    assert not slot.holds(block, 2)  # type: ignore[arg-type]


def test_what_may_change_unseen_is_never_held(ring: StagingRing, waits: Waits) -> None:
    block = Versioned(is_known=False)
    filled(ring, waits, 1, block)
    assert not ring.acquire(waits, 1).holds(block, 1)  # type: ignore[arg-type]


def test_its_last_write_is_waited_for_before_it_is_changed(ring: StagingRing, waits: Waits) -> None:
    ticket = Ticket()
    filled(ring, waits, 1, Versioned(), leaving=(ticket,))
    ring.acquire(waits, 1)
    assert ticket.num_waits == 1


def test_a_record_is_lent_while_its_slot_stays_in_the_ring(ring: StagingRing, waits: Waits) -> None:
    block, read = Versioned(), Ticket()
    address = filled(ring, waits, 1, block)
    seen: list[torch.Tensor] = []

    def use(record: torch.Tensor) -> Ticket:
        seen.append(record)
        return read

    assert ring.can_lend(1, block, 1)  # type: ignore[arg-type]
    assert ring.lend(1, block, 1, use)  # type: ignore[arg-type]
    assert (seen[0].data_ptr(), seen[0].numel()) == (address, 4096)
    ring.acquire(waits, 1)
    assert read.num_waits == 1


def test_what_is_old_or_in_use_is_not_lent(ring: StagingRing, waits: Waits) -> None:
    block = Versioned()

    def is_refused() -> bool:
        used = ring.lend(1, block, 1, lambda _: pytest.fail("lent"))  # type: ignore[arg-type]
        return not used and not ring.can_lend(1, block, 1)  # type: ignore[arg-type]

    assert is_refused()
    filled(ring, waits, 1, block)
    block.number += 1
    assert is_refused()
    block.number -= 1
    ring.acquire(waits, 1)
    assert is_refused()


def test_a_write_that_failed_leaves_nothing_held(ring: StagingRing, waits: Waits) -> None:
    block = Versioned()
    filled(ring, waits, 1, block, leaving=(Ticket(fails=True),))
    with pytest.raises(TierIOError):
        ring.drain(waits)
    assert not ring.acquire(waits, 1).holds(block, 1)  # type: ignore[arg-type]
    assert ring.num_free == 2


def test_empty_slots_go_first_then_those_released_longest_ago(ring: StagingRing, waits: Waits) -> None:
    addresses = [filled(ring, waits, key, Versioned()) for key in (1, 2)]
    assert ring.acquire(waits).take(4096).data_ptr() not in addresses
    assert ring.acquire(waits).take(4096).data_ptr() == addresses[0]


def test_what_is_forgotten_is_not_held(ring: StagingRing, waits: Waits) -> None:
    block = Versioned()
    filled(ring, waits, 1, block)
    ring.forget()
    assert not ring.acquire(waits, 1).holds(block, 1)  # type: ignore[arg-type]


@pytest.fixture
def long_ring(budget: Budget, accelerator: CpuAccelerator) -> StagingRing:
    return StagingRing("staging ring", 2, SLOT_BYTES, budget, accelerator, num_cached=3)


def test_a_longer_ring_keeps_more_and_leases_it_from_the_start(
    long_ring: StagingRing, budget: Budget, waits: Waits
) -> None:
    assert budget.holders() == {"cache of updated chunks": 3 * SLOT_BYTES, "staging ring": 2 * SLOT_BYTES}
    block = Versioned()
    for key in range(5):
        filled(long_ring, waits, key, block)
    assert all(long_ring.acquire(waits, key).holds(block, key) for key in range(5))  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="no staging slot"):
        long_ring.acquire(waits)


def test_work_that_runs_ahead_does_not_take_what_is_kept(long_ring: StagingRing, waits: Waits) -> None:
    for key in range(5):
        filled(long_ring, waits, key, Versioned())
    assert long_ring.has_room(1)
    assert not long_ring.has_room(2)


def test_the_cache_gives_way_to_whoever_needs_the_budget(accelerator: CpuAccelerator, waits: Waits) -> None:
    budget = Budget("host", 5 * SLOT_BYTES)
    ring = StagingRing("staging ring", 2, SLOT_BYTES, budget, accelerator, num_cached=3)
    block, busy = Versioned(), Ticket()
    for key in range(5):
        filled(ring, waits, key, block, leaving=() if key else (busy,))
    with budget.lease(SLOT_BYTES + 1, "copies"):
        assert budget.holders()["cache of updated chunks"] == SLOT_BYTES
        assert ring.num_free == 3
    # The oldest that nothing is under way from.
    held = [key for key in (0, 3, 4) if ring.acquire(waits, key).holds(block, key)]  # type: ignore[arg-type]
    assert held == [0, 3, 4]
    with pytest.raises(BudgetError):
        budget.lease(4 * SLOT_BYTES, "copies")
    ring.close()
    assert budget.leased_bytes == 0


def test_what_is_asked_for_in_the_same_order_again_is_met_where_it_still_is(
    long_ring: StagingRing, waits: Waits
) -> None:
    """Of five slots, two for work: going round over eight records, the three that stay are read no more."""
    long_ring.goes_round = True
    block = Versioned()
    rounds = []
    for _ in range(6):
        held = []
        for key in range(8):
            slot = long_ring.acquire(waits, key)
            if slot.holds(block, key):  # type: ignore[arg-type]
                held.append(key)
            slot.take(4096)
            slot.keep(block, key)  # type: ignore[arg-type]
            long_ring.release(slot, keeps=True)
        rounds.append(len(held))
    assert rounds[0] == 0
    assert min(rounds[1:]) >= 3
    long_ring.goes_round = False
    for key in range(8):
        filled(long_ring, waits, key, block)
    # As ever, what was released longest ago would be gone just before it is asked for.
    assert [key for key in range(8) if key in long_ring._full] == [3, 4, 5, 6, 7]


def test_going_round_what_is_waited_for_soonest_stays(long_ring: StagingRing, waits: Waits) -> None:
    """Records are updated from the last to the first, and waited for from the first on."""
    long_ring.goes_round = True
    block = Versioned()
    for _ in range(3):
        held = []
        for key in reversed(range(8)):
            slot = long_ring.acquire(waits, key)
            if slot.holds(block, key):  # type: ignore[arg-type]
                held.append(key)
            slot.take(4096)
            slot.keep(block, key)  # type: ignore[arg-type]
            long_ring.release(slot, keeps=True, urgency=key)
    assert held == [2, 1, 0]


def test_going_round_takes_the_oldest_where_few_are_full(ring: StagingRing, waits: Waits) -> None:
    ring.goes_round = True
    block = Versioned()
    for key in range(3):
        filled(ring, waits, key, block)
    assert ring.acquire(waits, 7).key == 7
    assert [key for key in range(3) if key in ring._full] == [1, 2]
