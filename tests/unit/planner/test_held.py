from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.paper_runs import done_step, run_on_paper

from zerooffload.planner.held import (
    ACTIVATIONS_MARGIN,
    BYTES_MARGIN,
    JOURNAL_NBYTES,
    PROCESS_NBYTES,
    TIME_MARGIN,
    Comparison,
    MeasuredStep,
    compared,
)

if TYPE_CHECKING:
    from zerooffload.planner.cost import Estimate
    from zerooffload.telemetry import StepReport

ALL = ("params", "optimizer", "gradients")


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return run_on_paper("640MiB", *ALL).estimate()


@pytest.fixture(scope="module")
def report() -> StepReport:
    """Of a step that takes what is predicted."""
    return done_step(run_on_paper("640MiB", *ALL))


def outside(estimate: Estimate, report: StepReport, **step: Any) -> dict[str, Comparison]:
    found = compared(estimate, MeasuredStep(report=report, **{"computes_on_host": False, **step}))
    return {comparison.name: comparison for comparison in found if comparison.is_outside}


def test_a_step_that_takes_what_is_predicted_differs_nowhere(estimate: Estimate, report: StepReport) -> None:
    found = compared(estimate, MeasuredStep(report=report, computes_on_host=False))
    assert [comparison.name for comparison in found] == [
        "device, leased", "host, leased", "nvme, leased", "nvme read", "nvme written", "copy in", "copy out", "step",
        "drive, busy", "update, busy", "landing, busy",
    ]  # fmt: skip
    assert all(comparison.ratio == pytest.approx(1.0, rel=1e-6) for comparison in found)
    assert not any(comparison.is_outside or comparison.cause for comparison in found)


def test_leases_are_exact(estimate: Estimate, report: StepReport) -> None:
    tiers = tuple(replace(tier, peak_bytes=tier.peak_bytes - (tier.name == "host")) for tier in report.tiers)
    found = outside(estimate, replace(report, tiers=tiers))
    assert list(found) == ["host, leased"]
    assert "leases otherwise than it was planned" in found["host, leased"].cause


@pytest.mark.parametrize("sign", [1, -1])
def test_bytes_are_within_a_hundredth_and_written_ones_may_have_a_record_of_the_journal(
    estimate: Estimate, report: StepReport, sign: int
) -> None:
    def moved(part: float, more: int = 0) -> StepReport:
        links = {name: round(nbytes * (1 + sign * part)) for name, nbytes in estimate.bytes_moved.items()}
        links["nvme_written"] += sign * more
        return replace(report, bytes_moved=links)

    assert outside(estimate, moved(0.99 * BYTES_MARGIN, JOURNAL_NBYTES)) == {}
    assert list(outside(estimate, moved(1.01 * BYTES_MARGIN, JOURNAL_NBYTES))) == [
        "nvme read", "nvme written", "copy in", "copy out",
    ]  # fmt: skip


def test_where_updates_are_hidden_a_drives_bytes_may_come_a_step_later(estimate: Estimate, report: StepReport) -> None:
    def moved(times: float) -> StepReport:
        links = {name: round(nbytes * times) for name, nbytes in estimate.bytes_moved.items()}
        return replace(report, bytes_moved=links)

    assert list(outside(estimate, moved(1.19), hides_updates=True)) == ["copy in", "copy out"]
    assert list(outside(estimate, moved(1.19))) == ["nvme read", "nvme written", "copy in", "copy out"]
    assert "nvme read" in outside(estimate, moved(1.21), hides_updates=True)


def test_what_clipping_did_twice_is_told(estimate: Estimate, report: StepReport) -> None:
    more = {**report.bytes_moved, "nvme_written": 2 * report.bytes_moved["nvme_written"]}
    found = outside(estimate, replace(report, bytes_moved=more), was_clipped=True)
    assert list(found) == ["nvme written"]
    assert "done again" in found["nvme written"].cause


def test_the_process_may_grow_by_leases_and_activations_and_a_tenth(estimate: Estimate, report: StepReport) -> None:
    host = next(account for account in estimate.memory if account.tier.value == "host")
    expected = host.leased_bytes + max(host.activations.values(), default=0)
    margin = ACTIVATIONS_MARGIN * expected + PROCESS_NBYTES
    assert outside(estimate, report, grown_bytes=int(expected + margin)) == {}
    assert list(outside(estimate, report, grown_bytes=int(expected + margin) + 2)) == ["host, leased and activations"]


@pytest.mark.parametrize("times", [1 - TIME_MARGIN, 1 + TIME_MARGIN])
def test_times_are_within_a_fifth(times: float) -> None:
    run = run_on_paper("640MiB", *ALL)
    within, beyond = 1 + 0.99 * (times - 1), 1 + 1.01 * (times - 1)
    assert outside(run.estimate(), done_step(run, times=within)) == {}
    assert "step" in outside(run.estimate(), done_step(run, times=beyond))


def test_a_slow_drive_is_named_and_so_is_its_part_of_the_step(estimate: Estimate, report: StepReport) -> None:
    drive = 2.1 * report.busy["drive"]
    late = replace(report, busy={"drive": drive}, seconds=report.seconds + drive - report.busy["drive"])
    found = outside(estimate, late)
    assert list(found) == ["step", "drive, busy"]
    assert found["step"].cause == "most of it is the drive"
    assert found["drive, busy"].told().startswith("drive, busy: ")
    assert (
        "the drive takes 2.1 times as long: it may be full, throttled, or used by others" in found["drive, busy"].cause
    )
    assert "zerooffload calibrate" in found["drive, busy"].cause


def test_a_step_that_no_resource_accounts_for_tells_its_longest_wait(estimate: Estimate, report: StepReport) -> None:
    late = replace(report, seconds=2 * report.seconds, waits={"state write": 0.5, "parameter read": 0.25})
    found = outside(estimate, late)
    assert list(found) == ["step"]
    assert found["step"].cause == "no resource alone accounts for it; it waited longest for state write, 500.0 ms"


def test_what_is_quicker_is_no_fault_of_the_machine(estimate: Estimate, report: StepReport) -> None:
    found = outside(estimate, replace(report, busy={"drive": 0.5 * report.busy["drive"]}))
    assert found["drive, busy"].cause == (
        "the drive takes 0.50 times as long; or the machine's profile is wrong: zerooffload calibrate makes it again"
    )
