from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from zerooffload.planner.drift import LEAST_PART, REFERENCE_STEPS, WINDOW_STEPS, DriftWatch, Shift

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NOISES: dict[str, Callable[[random.Random], float]] = {
    "a twentieth": lambda draws: draws.gauss(1.0, 0.05),
    "a fifth": lambda draws: draws.gauss(1.0, 0.2),
    "skewed": lambda draws: draws.lognormvariate(0.0, 0.3),
    "one step in ten is five times as long": lambda draws: draws.gauss(1.0, 0.1) * (5 if draws.random() < 0.1 else 1),
}


def shifts(values: Iterable[float]) -> list[tuple[int, Shift]]:
    """With the number of steps that it took to find each."""
    watch = DriftWatch(["step"])
    found = ((number, watch.add({"step": value, "other": 2 * value})) for number, value in enumerate(values, 1))
    return [(number, shift) for number, shift in found if shift is not None]


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_shift(noise: str) -> None:
    """Of 1,000 runs of 400 steps 3 raised an alarm at the most: of 100, more than two have a chance of 1 in 280."""
    alarms = 0
    for seed in range(100):
        draws = random.Random(seed)  # noqa: S311 - reproducible noise
        alarms += bool(shifts(NOISES[noise](draws) for _ in range(400)))
    assert alarms <= 2


@pytest.mark.parametrize(
    ("noise", "times"), [("a twentieth", 0.7), ("a twentieth", 1.3), ("a fifth", 2.0), ("skewed", 3.0)]
)
def test_what_becomes_slower_or_quicker_for_good_is_found_once(noise: str, times: float) -> None:
    """Not before two windows of it have been seen, and not later than three."""
    for seed in range(20):
        draws = random.Random(seed)  # noqa: S311
        values = [NOISES[noise](draws) * (times if step >= 100 else 1.0) for step in range(300)]
        ((number, shift),) = shifts(values)
        assert 100 + WINDOW_STEPS < number <= 100 + 3 * WINDOW_STEPS
        assert shift.names == ("step",)
        assert shift.before["step"] == pytest.approx(1.0, rel=0.2)
        assert shift.now["step"] == pytest.approx(times, rel=0.4)
        assert shift.now["other"] == 2 * shift.now["step"]


def test_what_is_slow_for_a_while_is_not_slow_for_good() -> None:
    burst = [1.0] * 40 + [3.0] * (2 * WINDOW_STEPS - 5) + [1.0] * 100
    assert shifts(burst) == []


def test_a_shift_back_is_found_too() -> None:
    values = [1.0] * 40 + [2.0] * 40 + [1.0] * 40
    (_, slower), (_, quicker) = shifts(values)
    assert (slower.before["step"], slower.now["step"]) == (1.0, 2.0)
    assert (quicker.before["step"], quicker.now["step"]) == (2.0, 1.0)


def test_less_than_a_tenth_does_not_count_however_regular_steps_are() -> None:
    steps = [1.0] * 40
    assert shifts(steps + [1.0 + 0.9 * LEAST_PART] * 100) == []
    assert len(shifts(steps + [1.0 + 1.1 * LEAST_PART] * 100)) == 1


def test_what_it_was_is_known_after_as_many_steps_as_that_takes() -> None:
    watch = DriftWatch(["step"])
    for number in range(REFERENCE_STEPS):
        assert watch.before is None
        watch.add({"step": float(number)})
    assert watch.before == {"step": (REFERENCE_STEPS - 1) / 2}
