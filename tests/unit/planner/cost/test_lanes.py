"""Tasks on lanes, against times that a person can add up."""

from __future__ import annotations

import pytest

from zerooffload.planner.cost.lanes import Pair, Task, busiest_seconds, run_lanes

DUPLEX = Pair(first=frozenset({"read"}), second=frozenset({"write"}), pool="drive", capacity=2.0)


def task(lane: str, seconds: float, *after: int, pool: str = "", load: float = 1.0, rank: int = 0) -> Task:
    return Task(lane=lane, seconds=seconds, after=after, rank=rank, loads={pool: load} if pool else {})


def test_lanes_run_beside_each_other_and_tasks_of_a_lane_one_after_the_other() -> None:
    timing = run_lanes([task("compute", 2.0), task("copy", 1.0), task("copy", 3.0)])
    assert timing.begins == [0.0, 0.0, 1.0]
    assert timing.ends == [2.0, 1.0, 4.0]


def test_a_task_waits_for_what_it_needs() -> None:
    timing = run_lanes([task("copy", 1.5), task("compute", 1.0, 0), task("copy", 1.0, 1)])
    assert timing.ends == [1.5, 2.5, 3.5]


def test_of_several_that_are_ready_the_least_rank_goes_first() -> None:
    tasks = [task("copy", 1.0), task("update", 1.0, 0, rank=2), task("update", 1.0, 0, rank=1)]
    assert run_lanes(tasks).ends == [1.0, 3.0, 2.0]


def test_what_shares_a_pool_is_slowed_alike() -> None:
    # Both run at half speed for 2 s; then the longer one has 1 s left, alone.
    assert run_lanes([task("read", 1.0, pool="drive"), task("write", 2.0, pool="drive")]).ends == [2.0, 3.0]


def test_loads_that_a_pool_bears_slow_nobody() -> None:
    tasks = [task("copy in", 1.0, pool="memory", load=0.4), task("update", 1.0, pool="memory", load=0.6)]
    assert run_lanes(tasks).ends == [1.0, 1.0]


def test_a_part_of_a_pool_that_is_overloaded_slows_by_the_overload() -> None:
    tasks = [task("copy in", 1.0, pool="memory", load=0.5), task("update", 1.0, pool="memory", load=1.0)]
    assert run_lanes(tasks).ends == pytest.approx([1.5, 1.5])


def test_a_drive_with_both_directions_at_once_needs_no_longer_for_both() -> None:
    tasks = [task("read", 1.0, pool="drive"), task("write", 1.0, pool="drive")]
    assert run_lanes(tasks, [DUPLEX]).ends == [1.0, 1.0]
    assert busiest_seconds(tasks, [DUPLEX]) == 1.0
    assert busiest_seconds(tasks) == 2.0


def test_a_task_begins_when_a_slot_is_free() -> None:
    tasks = [
        Task(lane="read", seconds=1.0, takes="ring"),
        Task(lane="read", seconds=1.0, takes="ring"),
        Task(lane="write", seconds=5.0, after=(0,), frees="ring"),
    ]
    assert run_lanes(tasks, slots={"ring": 1}).begins == [0.0, 6.0, 1.0]
    assert run_lanes(tasks, slots={"ring": 2}).begins == [0.0, 1.0, 1.0]


def test_a_slot_that_nothing_frees_is_told() -> None:
    with pytest.raises(ValueError, match="no slot is free"):
        run_lanes([Task(lane="read", seconds=1.0, takes="ring")], slots={"ring": 0})


def test_a_task_cannot_wait_for_a_later_one() -> None:
    with pytest.raises(ValueError, match="waits for a later one"):
        run_lanes([task("compute", 1.0, 1), task("compute", 1.0)])


def test_tasks_that_take_no_time_order_others() -> None:
    assert run_lanes([task("compute", 1.0), task("step", 0.0, 0), task("update", 1.0, 1)]).ends == [1.0, 1.0, 2.0]


def test_together_never_quicker_than_the_busiest() -> None:
    tasks = [
        task("compute", 1.0),
        task("read", 0.7, pool="drive"),
        task("write", 0.9, 0, pool="drive"),
        task("compute", 0.4, 1),
    ]
    assert max(run_lanes(tasks).ends) >= busiest_seconds(tasks) == pytest.approx(1.6)
