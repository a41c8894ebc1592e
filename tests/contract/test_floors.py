"""The floor that benchmarks compare a step with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "floors.py"

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="a source package has no benchmarks")


@pytest.fixture(scope="module")
def floors() -> ModuleType:
    spec = importlib.util.spec_from_file_location("floors", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up there.
    sys.modules["floors"] = module
    spec.loader.exec_module(module)
    return module


def workload(floors: ModuleType, **changes: Any) -> Any:
    """All on nvme; 12 units, a window of 3 of them."""
    tier = floors.Tier.NVME
    fields = {"num_params": 1200, "num_units": 12, "num_kept_units": 3, "commits": True}
    return floors.Workload(**{**fields, "params": tier, "optimizer": tier, "gradients": tier, **changes})


def speeds(floors: ModuleType, **changes: Any) -> Any:
    """One byte a second on the drive, everything else for nothing."""
    free = float("inf")
    return floors.Speeds(**{"disk": lambda _: 1.0, "copy": free, "host_traffic": free, "kernel": free, **changes})


def test_bytes_of_a_step_with_all_on_nvme(floors: ModuleType) -> None:
    step = floors.step_demand(workload(floors))
    # 16 for the update; parameters once for forward, and for backward those that the window does not hold.
    assert floors.expected_bytes(step) == {
        "nvme_read": 1200 * (16 + 4 + 4 * 3 / 4),
        "nvme_written": 1200 * (12 + 4),
        "copy_in": 1200 * (4 + 4 * 3 / 4),
        "copy_out": 1200 * 4,
    }


def test_accumulation_reads_and_writes_gradients_again(floors: ModuleType) -> None:
    step = floors.step_demand(workload(floors, accumulation=3))
    moved = floors.expected_bytes(step)
    # The first forward finds an empty window; the five other passes find what the one before left.
    assert moved["copy_in"] == 1200 * (4 + 5 * 4 * 3 / 4)
    assert moved["nvme_read"] == moved["copy_in"] + 1200 * (16 + 2 * 4)
    assert moved["nvme_written"] == 1200 * (12 + 3 * 4)
    assert moved["copy_out"] == 1200 * 3 * 4


def test_what_the_ring_holds_is_not_read(floors: ModuleType) -> None:
    with_cache = floors.step_demand(workload(floors, num_cached=200))
    without = floors.step_demand(workload(floors))
    less = floors.expected_bytes(without)["nvme_read"] - floors.expected_bytes(with_cache)["nvme_read"]
    # For the forward, and for the update.
    assert less == 200 * (4 + 12)


def test_memory_is_read_and_written_by_the_kernel_copies_and_checksums(floors: ModuleType) -> None:
    host = floors.Tier.HOST
    homes = {"params": host, "optimizer": host, "gradients": host, "commits": False}
    step = floors.step_demand(workload(floors, **homes))
    assert step.update.host_traffic_bytes == 1200 * 28
    assert step.backwards[0].host_traffic_bytes == 1200 * (3 + 4 + 4)
    by_core, by_nothing = (floors.step_demand(workload(floors, copy_passes=n, **homes)) for n in (2, 0))
    assert by_core.backwards[0].host_traffic_bytes == 1200 * (2 * 3 + 2 * 4 + 4)
    assert by_nothing.backwards[0].host_traffic_bytes == 1200 * 4
    assert floors.expected_bytes(step)["nvme_read"] == 0
    on_cpu = floors.step_demand(workload(floors, copies=False, **homes))
    assert on_cpu.forwards[0] == floors.Demand()
    assert floors.step_demand(workload(floors)).update.host_traffic_bytes == 1200 * (28 + 12)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Forward reads 4, backward 3 and writes 4, the update moves 28; compute takes 9 and 18.
        ("after_backward", 27 + 28),
        ("under_next_forward", max(9, 4 + 28) + max(18, 7)),
        ("during_backward", max(27, 4 + 7 + 28)),
    ],
)
def test_a_floor_is_the_maximum_in_each_section(floors: ModuleType, schedule: str, expected: float) -> None:
    step = floors.step_demand(workload(floors, compute_seconds=27 * 1200.0))
    assert floors.floor_seconds(step, floors.UpdateMode(schedule), speeds(floors)) == 1200 * expected


def test_with_accumulation_the_update_has_the_first_forward_and_the_last_backward(floors: ModuleType) -> None:
    step = floors.step_demand(workload(floors, compute_seconds=90 * 1200.0, accumulation=2))
    # A forward computes 15, a backward 30. Of the others, the first backward and the second forward.
    during = floors.floor_seconds(step, floors.UpdateMode.DURING_BACKWARD, speeds(floors))
    assert during == 1200 * (max(15 + 30, 28 + 4 + 11) + max(30 + 15, 7 + 3))
    under = floors.floor_seconds(step, floors.UpdateMode.UNDER_NEXT_FORWARD, speeds(floors))
    assert under == 1200 * (max(15, 28 + 4) + max(30 + 15 + 30, 7 + 3 + 11))


@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("compute", [0.0, 10.0, 50.0, 500.0])
def test_the_more_may_overlap_the_lower_the_floor(floors: ModuleType, compute: float, accumulation: int) -> None:
    step = floors.step_demand(workload(floors, compute_seconds=compute * 1200, accumulation=accumulation))
    at = speeds(floors)
    # In the order of its members each schedule lets the update run beside more.
    serial, under, during = (floors.floor_seconds(step, schedule, at) for schedule in floors.UpdateMode)
    most = max(at.seconds(step.total).values())
    assert most <= during <= floors.sum_seconds(step, at)
    assert most <= under <= serial <= floors.sum_seconds(step, at)


def test_the_slowest_link_is_no_compute(floors: ModuleType) -> None:
    step = floors.step_demand(workload(floors, compute_seconds=1e9))
    assert floors.slowest_link(step, speeds(floors)) == ("disk", 1200 * 39.0)
    assert floors.slowest_link(step, speeds(floors, kernel=0.001)) == ("kernel", 1200 * 1000.0)


@pytest.mark.parametrize(
    ("read", "written", "mix"),
    [
        (0, 0, (0, 0)),
        (5, 0, (1, 0)),
        (0, 5, (0, 1)),
        (5, 5, (1, 1)),
        (24, 16, (5, 3)),
        (1, 1000, (1, 7)),
        (6, 2, (3, 1)),
    ],
)
def test_a_mix_is_in_eighths(floors: ModuleType, read: float, written: float, mix: tuple[int, int]) -> None:
    assert floors.mix_of(floors.Demand(disk_read_bytes=read, disk_written_bytes=written)) == mix
