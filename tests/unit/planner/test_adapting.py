from __future__ import annotations

import pytest
from support.paper_runs import done_step, run_on_paper, with_slower_drives

from zerooffload.config import UpdateMode
from zerooffload.planner.adapting import quicker_schedule
from zerooffload.planner.held import MeasuredStep, measured_seconds, predicted_seconds

ALL = ("params", "optimizer", "gradients")


def measured(times: float, slower: float = 1.0) -> dict[str, float]:
    run = with_slower_drives(run_on_paper("640MiB", *ALL), slower)
    return measured_seconds(MeasuredStep(report=done_step(run, times=times), computes_on_host=False))


def test_what_was_measured_is_what_is_predicted_afterwards() -> None:
    run = run_on_paper("640MiB", *ALL)
    assert run.as_measured(measured(1.0)).estimate().seconds == pytest.approx(run.estimate().seconds)
    slow = with_slower_drives(run, 4.0)
    corrected = run.as_measured(measured(1.0, slower=4.0))
    assert set(corrected.machine.corrections) == {"drive", "update", "landing"}
    busy = predicted_seconds(slow.estimate(), computes_on_host=False)
    assert predicted_seconds(corrected.estimate(), computes_on_host=False)["drive"] == pytest.approx(
        busy["drive"], rel=0.02
    )
    assert corrected.estimate().seconds == pytest.approx(slow.estimate().seconds, rel=0.02)


def test_corrections_add_up() -> None:
    """They are factors on those that the profile has; and what takes as long again needs no other."""
    run = run_on_paper("640MiB", *ALL)
    once = run.as_measured(measured(1.0, slower=4.0))
    again = once.as_measured(measured_seconds(MeasuredStep(report=done_step(once), computes_on_host=False)))
    assert again.machine.corrections == pytest.approx(once.machine.corrections)


def test_a_resource_with_nothing_to_do_stays_as_it_is() -> None:
    run = run_on_paper("640MiB")
    assert "drive" not in run.as_measured({"drive": 0.0, "update": 0.01, "landing": 0.01}).machine.corrections


def test_where_the_drive_is_the_bound_updates_that_come_back_the_same_way_read_less() -> None:
    """The ring's slots keep what was updated last, for an update that begins with it; see tiers/staging.py."""
    run = run_on_paper("512MiB", *ALL)
    assert quicker_schedule(run, UpdateMode, noise_part=0.1) is None
    slow = with_slower_drives(run, 10)
    other = quicker_schedule(slow, UpdateMode, noise_part=0.1)
    assert other is not None
    assert other.schedule is UpdateMode.AFTER_BACKWARD
    assert other.seconds == slow.updating(UpdateMode.AFTER_BACKWARD).estimate().seconds < 0.9 * other.now_seconds
    assert quicker_schedule(slow, UpdateMode, noise_part=0.2) is None
    assert quicker_schedule(slow, [slow.kind.schedule], noise_part=0.1) is None
