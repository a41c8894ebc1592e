from __future__ import annotations

import pytest
from support.paper_runs import run_on_paper, with_slower_drives

from zerooffload.config import UpdateMode


@pytest.mark.parametrize("on_nvme", [("params", "optimizer", "gradients"), ("optimizer",)], ids=["all", "optimizer"])
@pytest.mark.parametrize("schedule", UpdateMode)
def test_what_an_update_leaves_to_be_done_is_over_before_the_next_one(
    schedule: UpdateMode, on_nvme: tuple[str, ...]
) -> None:
    """So steps are never shorter than what the drive is busy for, also where nothing waits for a unit's own writes."""
    run = with_slower_drives(run_on_paper("1GiB", *on_nvme), 30).updating(schedule).estimate()
    assert run.bound == "drive"
    assert run.seconds >= 0.999 * run.busy["drive"]
