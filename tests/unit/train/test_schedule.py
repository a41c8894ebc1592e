from __future__ import annotations

import pytest

from zerooffload.train.recipe import ScheduleSection
from zerooffload.train.schedule import lr_factor


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1, 1, 1 - 0.8 * (1 - 0.5**0.5) / 2, 0.6, 1 - 0.8 * (1 + 0.5**0.5) / 2]),
    ],
)
def test_the_rate_rises_and_falls_as_named(kind: str, factors: list[float]) -> None:
    schedule = ScheduleSection(kind=kind, warmup_steps=2, final_fraction=0.2)
    assert [lr_factor(schedule, step, 6) for step in range(6)] == pytest.approx(factors)


def test_warming_up_for_all_steps_is_possible() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=4)
    assert [lr_factor(schedule, step, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
