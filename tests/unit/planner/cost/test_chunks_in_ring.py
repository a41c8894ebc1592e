"""What is still in host memory when a unit is wanted again, by hand, in a ring of 2 + 4 slots."""

from __future__ import annotations

import pytest

from zerooffload.planner.cost.chunks_in_ring import ChunksInRing
from zerooffload.planner.cost.demand import Demand, UnitDemand
from zerooffload.planner.placement import NUM_STAGING_SLOTS

ORDER = ["a", "b", "c"]
NUM_CACHED = 2


def ring_of(*, goes_round: bool, goes_ahead: bool = False) -> ChunksInRing:
    assert NUM_STAGING_SLOTS == 4
    demands = {name: _unit() for name in ORDER}
    return ChunksInRing(demands, NUM_CACHED, 4 * len(ORDER), goes_round=goes_round, goes_ahead=goes_ahead)


def _unit() -> UnitDemand:
    """Of four chunks, the last one short: 60, 60, 60, 20."""
    none = Demand()
    return UnitDemand(
        range_nbytes=1,
        arrival=none,
        first_arrival=none,
        leaving=none,
        first_leaving=none,
        gradient_at_home=0,
        update=none,
        num_updated=200,
        on_device=False,
        goes_ahead=True,
        device_traffic=0,
        lent_nbytes=0,
        staged_nbytes=1,
        checked_nbytes=0,
        chunk_numels=(60, 60, 60, 20),
    )


def test_there_and_back_the_last_ones_of_an_update_are_the_first_of_the_next() -> None:
    ring = ring_of(goes_round=False)
    ring.leave(ORDER, is_backwards=False)
    assert ring.held == ring.kept == {"c": 1.0, "b": 80 / 200, "a": 0.0}
    ring.leave(ORDER[::-1], is_backwards=True)
    assert ring.held == ring.kept == {"a": 1.0, "b": 120 / 200, "c": 0.0}


def test_behind_a_backward_the_first_units_of_forward_were_updated_last() -> None:
    ring = ring_of(goes_round=True, goes_ahead=True)
    ring.leave(ORDER, is_backwards=False)
    assert ring.held == {"a": 1.0, "b": 80 / 200, "c": 0.0}
    assert ring.kept == {"a": 120 / 200, "b": 0.0, "c": 0.0}


def test_a_visit_beside_the_update_finds_only_what_stays_for_it() -> None:
    ring = ring_of(goes_round=True, goes_ahead=True)
    ring.leave(ORDER, is_backwards=False)
    assert [ring.part_for_visit("b", is_first=True, is_beside_update=beside) for beside in (False, True)] == [0.4, 0.0]


def test_in_the_order_of_forward_the_last_chunks_that_passed_are_there() -> None:
    ring = ring_of(goes_round=True)
    ring.leave(ORDER, is_backwards=False)
    assert ring.kept == {"a": 120 / 200, "b": 0.0, "c": 0.0}
    assert ring.held == {"a": 120 / 200, "b": 0.0, "c": 1.0}
    # A unit's update is just before its first visit.
    assert ring.part_for_visit("b", is_first=True, is_beside_update=False) == pytest.approx(1 / 4)
