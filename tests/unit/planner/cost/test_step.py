"""Steps on paper against sums by hand: 4 layers of a million parameters on a machine with round figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.paper import all_in, chain, limits, machine, problem_of, profile_of

import zerooffload as zo
from zerooffload.config import TierName, UpdateMode
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.cost import Estimate, Lane, StepKind, estimate, speeds_of
from zerooffload.planner.cost.step import floor_seconds
from zerooffload.planner.problem import choices_of
from zerooffload.planner.profiles import MachineProfile, ModelProfile

P = 1000 * 1000
MS = 1e-3
LAYERS = [1000] * 4


def planned(
    *, forward: float, backward: float, device_memory: int | None = None, shares_host: bool = False, **settings: Any
) -> tuple[AnnouncedPlan, ModelProfile]:
    config = zo.OffloadConfig(nvme_paths=["/paper"], units=["0", "1", "2", "3"], **settings)
    problem = problem_of(chain(LAYERS), config, shares_host=shares_host)
    bounds = limits(shares_host=shares_host)
    if device_memory is not None:
        bounds = replace(bounds, device_bytes=device_memory)
    return problem.announced(choices_of(config), bounds), profile_of(
        problem.layouts, forward=forward, backward=backward
    )


def of(plan: AnnouncedPlan, model: ModelProfile, kind: StepKind, paper: MachineProfile | None = None) -> Estimate:
    return estimate(plan, model, paper or machine(shares_host=plan.limits.device_shares_host), kind)


def test_after_backward_the_update_adds_up() -> None:
    plan, model = planned(**all_in(TierName.HOST), update="after_backward", forward=10 * MS, backward=20 * MS)
    found = of(plan, model, StepKind(schedule=UpdateMode.AFTER_BACKWARD))
    # The first layer comes (4 ms), then compute; the last gradient leaves (4 ms) and is read for its norm (4 MB at
    # 28 GB/s); then four updates, 1 ms each.
    assert found.seconds == pytest.approx((4 + 4 * 30 + 4 + 4 / 28 + 4) * MS, rel=1e-6)
    assert found.bound == "compute"
    assert found.bytes_moved == {
        "nvme_read": 0,
        "nvme_written": 0,
        "copy_in": 16 * P,
        "copy_out": 16 * P,
        "gathered": 0,
        "reduced": 0,
    }


def test_a_small_window_brings_parameters_again_for_backward() -> None:
    settings = {**all_in(TierName.HOST), "update": "after_backward"}
    plan, model = planned(**settings, forward=10 * MS, backward=20 * MS, device_memory=17 * P)
    # 8 MB of gradients gather, and 9 MB hold two layers: those at the turn stay, the other two come again.
    assert of(plan, model, StepKind(schedule=UpdateMode.AFTER_BACKWARD)).bytes_moved["copy_in"] == 24 * P


def test_hidden_the_slowest_resource_is_what_a_step_takes() -> None:
    plan, model = planned(**all_in(TierName.NVME), forward=1 * MS, backward=1 * MS)
    found = of(plan, model, StepKind(schedule=UpdateMode.DURING_BACKWARD))
    # Four chunks, one for each slot of the ring: parameters and moments stay there, gradients alone are read. All three
    # are written, in whole blocks of 4096 bytes.
    assert found.bytes_moved["nvme_read"] == 4 * 4096 * 977
    assert found.bytes_moved["nvme_written"] == 4 * 4096 * (977 + 1954 + 977)
    assert found.bound == "drive"
    drive = (found.bytes_moved["nvme_read"] + found.bytes_moved["nvme_written"]) / 1e9
    assert found.busy["drive"] == pytest.approx(drive)
    assert drive <= found.seconds <= 1.05 * drive


def test_where_compute_is_longest_all_else_hides_under_it() -> None:
    plan, model = planned(**all_in(TierName.NVME), forward=100 * MS, backward=200 * MS)
    found = of(plan, model, StepKind(schedule=UpdateMode.DURING_BACKWARD))
    assert 1.2 <= found.seconds <= 1.02 * 1.2


def test_accumulated_gradients_leave_each_time_and_are_joined() -> None:
    settings = {**all_in(TierName.HOST), "update": "after_backward", "accumulation_steps": 3}
    plan, model = planned(**settings, forward=10 * MS, backward=20 * MS)
    found = of(plan, model, StepKind(schedule=UpdateMode.AFTER_BACKWARD, accumulation=3))
    # Those that are joined come through staging slots, in whole blocks of 4096 bytes: 4 MB is 976.6 of them.
    joined = 4 * 4096 * 977
    assert found.bytes_moved["copy_out"] == 16 * P + 2 * joined
    assert found.seconds > 3 * 4 * 30 * MS


def test_on_a_cpu_nothing_is_copied_and_the_update_takes_the_cores() -> None:
    settings = {**all_in(TierName.HOST), "update": "after_backward"}
    plan, model = planned(**settings, forward=10 * MS, backward=20 * MS, shares_host=True)
    found = of(plan, model, StepKind(schedule=UpdateMode.AFTER_BACKWARD))
    # Gradients are written home where they are made: 8 MB a layer at 1 TB/s.
    assert found.seconds == pytest.approx((4 * 30 + 4 * 8e-3 + 4) * MS, rel=1e-6)
    assert set(found.bytes_moved.values()) == {0}


def test_what_computes_again_adds_a_forward_to_backward() -> None:
    settings = {**all_in(TierName.HOST), "update": "after_backward"}
    plan, model = planned(**settings, forward=10 * MS, backward=20 * MS, shares_host=True)
    usual, again = (
        of(plan, model, StepKind(schedule=UpdateMode.AFTER_BACKWARD, computed_again=frozenset(names))).seconds
        for names in ((), ("0", "1"))
    )
    assert again - usual == pytest.approx(20 * MS)


def test_corrections_are_factors_on_times() -> None:
    settings = {**all_in(TierName.HOST), "update": "after_backward"}
    plan, model = planned(**settings, forward=10 * MS, backward=20 * MS, shares_host=True)
    slower = machine(shares_host=True, corrections={"compute": 2.0, "update": 3.0})
    found = of(plan, model, StepKind(schedule=UpdateMode.AFTER_BACKWARD), slower)
    assert found.seconds == pytest.approx((2 * 4 * 30 + 4 * 8e-3 + 3 * 4) * MS, rel=1e-6)


@pytest.mark.parametrize("schedule", list(UpdateMode))
@pytest.mark.parametrize("tier", [TierName.HOST, TierName.NVME])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_step_is_shorter_than_its_floor(schedule: UpdateMode, tier: TierName, accumulation: int) -> None:
    plan, model = planned(**all_in(tier), update=schedule.value, forward=5 * MS, backward=10 * MS)
    kind = StepKind(schedule=schedule, accumulation=accumulation)
    floor = floor_seconds(plan, model, speeds_of(machine()), kind)
    assert of(plan, model, kind).seconds >= floor * (1 - 1e-9)


def test_lanes_of_a_step_begin_at_its_start_and_end_with_it() -> None:
    plan, model = planned(**all_in(TierName.NVME), forward=5 * MS, backward=10 * MS)
    found = of(plan, model, StepKind(schedule=UpdateMode.DURING_BACKWARD))
    assert all(0 <= span.begin <= span.end for span in found.spans)
    assert {span.lane for span in found.spans} >= {Lane.COMPUTE, Lane.COPY_IN, Lane.STATE_READ, Lane.WRITE}


def test_a_dtype_without_a_rate_is_an_error_that_says_what_to_do() -> None:
    plan, model = planned(**all_in(TierName.HOST), forward=5 * MS, backward=10 * MS)
    bf16 = replace(model.units[0], forward=replace(model.units[0].forward, flops={"bf16": 1.0}))
    with pytest.raises(zo.ConfigError, match=r"no rate of matrix products in bf16.*zerooffload calibrate"):
        of(plan, replace(model, units=(bf16, *model.units[1:])), StepKind(schedule=UpdateMode.AFTER_BACKWARD))
