"""The arithmetic of docs/planning.md is right, and the planner comes to the same."""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zerooffload
from zerooffload.config import OffloadConfig
from zerooffload.planner.cost import speeds_of
from zerooffload.planner.cost.demand import unit_demands
from zerooffload.planner.profiles import PassWork, find_machine
from zerooffload.train.planning import changed_machine

if TYPE_CHECKING:
    from types import ModuleType

    from zerooffload.planner.plan import Plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = Path(zerooffload.__file__).parent / "docs" / "planning.md"
NEAR = 0.006
"""Half of the last digit that the page shows."""

pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="a source package has no benchmarks")
pytest.importorskip("transformers")


@dataclass(frozen=True)
class Row:
    """Of a table of the page: what a resource does."""

    what: str
    amount: float
    rate: float
    seconds: float


def rows_below(heading: str) -> dict[str, list[Row]]:
    """The rows of the table that follows `heading`, by resource."""
    units = {"GB": 1e9, "TFLOP": 1e12, "operations": 1.0, "us": 1e-6}
    found = defaultdict(list)
    below = PAGE.read_text(encoding="utf-8").split(f"**{heading}")[1].split("|---|---|---|---|---|\n")[1]
    for line in below.split("\n\n")[0].splitlines():
        resource, what, amount, rate, seconds = (cell.strip() for cell in line.strip("|").split(" | "))
        number, unit = amount.replace(",", "").split(" ")
        per, of = re.fullmatch(r"([\d.]+) (\w+)(?:/s)?", rate.replace(",", "")).groups()  # type: ignore[union-attr]
        speed = 1 / (float(per) * units[of]) if of == "us" else float(per) * units[of]
        found[resource].append(Row(what, float(number) * units[unit], speed, float(seconds)))
    return found


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """The scripts' own models."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("plan_setups")
    finally:
        sys.path.remove(str(BENCHMARKS))


def plan_of(benchmarks: ModuleType, model: str, machine: str, settings: list[str], **config: Any) -> Plan:
    profile = changed_machine(find_machine(machine), settings)
    whole = OffloadConfig(**benchmarks.SETTINGS, nvme_paths=[drive.path for drive in profile.drives], **config)
    found: Plan = benchmarks.plan_paper_model(benchmarks.MODELS[model], whole, profile, batch_size=8)
    return found


@pytest.fixture(scope="module")
def small(benchmarks: ModuleType) -> Plan:
    homes = {"params": "host", "gradients": "host", "optimizer": "nvme", "update": "under_next_forward"}
    machine = ["machine.host.memory=64GB", "machine.drives=2"]
    return plan_of(benchmarks, "8 B", "rtx4090", machine, **homes, host_memory="41.1GB")


@pytest.fixture(scope="module")
def large(benchmarks: ModuleType) -> Plan:
    homes = {"params": "nvme", "gradients": "nvme", "optimizer": "nvme"}
    return plan_of(benchmarks, "70 B", "4x-rtx4090", ["machine.host.memory=256GB"], **homes, host_memory="24GB")


def check(rows: dict[str, list[Row]], amounts: dict[str, list[float]], plan: Plan) -> None:
    """Each amount is that of the formula, each time follows from it, and all of a resource's are the planner's."""
    for resource, expected in amounts.items():
        for row, amount in zip(rows[resource], expected, strict=True):
            assert row.amount == pytest.approx(amount, rel=NEAR), row.what
            assert row.seconds == pytest.approx(row.amount / row.rate, abs=0.006, rel=NEAR), row.what
        total = sum(row.seconds for row in rows[resource])
        assert total == pytest.approx(plan.estimate.busy[resource], rel=NEAR), resource


def test_8_b_on_one_gpu(small: Plan) -> None:
    rows, params = rows_below("8 B, one GPU"), small.num_params
    cached = small.announced.num_cached_slots * small.announced.placement.slot_nbytes
    inputs = 32 * 8 * 2048 * 4096 * 2
    # A slice's products once more for the blocks, which are computed again.
    again = [work for work in small.model.units if work.name in small.kind.computed_again]
    work = sum((unit.forward + unit.backward for unit in small.model.units), PassWork())
    work = sum((unit.forward for unit in again), work)
    amounts = {
        "drive": [10 * params - cached, 10 * params],
        "update": [26 * params, 10 * params],
        "copy in": [2 * params + inputs],
        "copy out": [2 * params + inputs],
        "compute": [8 * work.flops["bf16"], 8 * work.memory_bytes, 8 * work.num_operations],
    }
    assert set(rows) == set(amounts)
    check(rows, amounts, small)
    # FLOPs of a parameter and token: in a block 2 forward, 2 again, 4 backward; in the head 6. Attention is on top.
    head = 128256 * 4096
    products = 8 * 2048 * (8 * (params - 2 * head) + 6 * head)
    assert products < 8 * work.flops["bf16"] < 1.05 * products
    speeds = speeds_of(small.machine)
    backward = sum(8 * speeds.compute_seconds(unit.backward) for unit in small.model.units)
    backward += sum(8 * speeds.compute_seconds(unit.forward) for unit in again)
    late = small.estimate.busy["drive"] + backward - small.floor_seconds
    told = re.findall(r"([\d.]+) s", PAGE.read_text(encoding="utf-8").split("though not until")[1].split("\n\n")[0])
    before = small.estimate.busy["drive"] - late
    figures = [late, before, backward, small.floor_seconds, small.estimate.seconds]
    assert [float(seconds) for seconds in told] == pytest.approx(figures, abs=0.06)
    # Four pieces of the unit that is updated last, of a quarter each: 10 bytes a parameter.
    largest = max(unit.num_updated for unit in unit_demands(small.announced.placement).values())
    assert late == pytest.approx(10 * largest / 8e9, rel=0.02)


def test_70_b_on_four_gpus(large: Plan) -> None:
    rows, params = rows_below("70 B, four GPUs"), large.num_params
    window = large.announced.window_nbytes
    kept = window / large.announced.placement.window.most_nbytes
    cached = large.announced.num_cached_slots * large.announced.placement.slot_nbytes
    assert (window / 1e9, kept, cached / 1e9) == pytest.approx((12.67, 0.09, 2.26), rel=NEAR)
    amounts = {
        "drive": [(14 + 2 + 2 * (1 - kept)) * params / 4 - cached, 14 * params / 4],
        "link": [0.75 * 2 * params * (2 - kept), 0.75 * 2 * params],
    }
    assert set(rows) == set(amounts)
    check(rows, amounts, large)
    assert large.estimate.bound == "drive"
    assert large.estimate.busy["drive"] == pytest.approx(110, abs=0.5)
    assert large.estimate.seconds == pytest.approx(111, abs=0.5)


def test_what_drives_bear(small: Plan, large: Plan) -> None:
    told = re.search(
        r"writes (\d+) GB in (\d+) s, which two drives of 7,008 TB bear for (\d+)\s+days,"
        r" the second (\d+) GB in (\d+) s, which four bear for (\d+)",
        PAGE.read_text(encoding="utf-8"),
    )
    assert told is not None
    figures = [float(number) for number in told.groups()]
    for plan, (gigabytes, seconds, days) in ((small, figures[:3]), (large, figures[3:])):
        written = plan.estimate.bytes_moved["nvme_written"] * plan.machine.device.count
        assert (written / 1e9, plan.estimate.seconds) == pytest.approx((gigabytes, seconds), rel=0.02)
        assert plan.drive_days == pytest.approx(days, rel=0.02)
        bears = sum(drive.endurance or 0 for drive in plan.machine.drives)
        assert plan.drive_days == pytest.approx(bears / (written / plan.estimate.seconds * 86400))


def test_many_ranks_send_and_hold_what_zeros_formulas_say(
    benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = benchmarks.plan_ranks
    monkeypatch.setattr(ranks, "RANKS", (8, 64))
    found = ranks.rows()
    for row, count in zip(found, (8, 64), strict=True):
        others, params = (count - 1) / count, row["num_params"]
        assert row["reduced"] == pytest.approx(others * 2 * params, rel=0.002)
        # Forward and backward; what the window holds at the turn comes once.
        assert others * 2 * params < row["gathered"] < 1.001 * others * 4 * params
        # fp16: a gradient, a master and two moments on host, beside a staging ring; the parameter on the device.
        assert row["params_on_device"] == pytest.approx(2 * params / count, rel=0.07)
        assert row["host"] == pytest.approx(14 * params / count + (64 << 20), rel=0.01)
        assert row["link_seconds"] == pytest.approx(
            (row["gathered"] + row["reduced"]) / (150e9 if count == 8 else 80e9)
        )
    assert ranks.table(found).count("\n") == 4
    ranks.plot(found, tmp_path)
    assert {file.name: file.read_text().count("<polyline") for file in tmp_path.iterdir()} == {
        "plan_ranks.svg": 2,
        "plan_ranks_bytes.svg": 3,
    }


def test_the_largest_model_on_host_is_the_published_one(benchmarks: ModuleType) -> None:
    sizes = benchmarks.plan_sizes
    system = next(system for system in sizes.SYSTEMS if system.name == "ZeRO-Infinity, CPU")
    plan = sizes._plan(system, 68)
    assert plan is not None
    assert sizes._plan(system, 69) is None
    assert abs(plan.num_params / system.published - 1) < 0.25
    # 16 bytes a parameter, of three quarters of the host's memory.
    assert plan.num_params == pytest.approx(0.75 * 1.5e12 / 16, rel=0.02)
