from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload.telemetry import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make_report() -> Callable[..., StepReport]:
    """`make_report(step, **bytes by link)`."""

    def make(step: int, **bytes_moved: int) -> StepReport:
        return StepReport(
            step=step,
            seconds=1.0,
            bytes_moved=bytes_moved,
            waits={"state read": 0.25},
            work={},
            tiers=(),
            baseline_bytes=0,
            process_peak_bytes=0,
        )

    return make
