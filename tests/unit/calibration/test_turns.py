from __future__ import annotations

from functools import partial

import pytest

from zerooffload.calibration import turns
from zerooffload.calibration.effort import Effort
from zerooffload.calibration.turns import Figure, repeated, take_turns


def test_figures_take_turns_and_each_begins_a_round() -> None:
    asked: list[tuple[str, float]] = []

    def turn(name: str, seconds: float) -> float:
        asked.append((name, seconds))
        return float(len(asked))

    told: list[tuple[str, float]] = []
    figures = [Figure(name, partial(turn, name), seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 1.0))]
    samples = take_turns(figures, 3, lambda what, part: told.append((what, part)))
    assert "".join(name for name, _ in asked) == "abc" + "bca" + "cab"
    assert samples == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    assert [name for name, _ in told] == [name for name, _ in asked]
    assert [12 * part for _, part in told] == pytest.approx([0, 1, 3, 4, 6, 7, 8, 9, 10])
    assert {seconds for name, seconds in asked if name == "b"} == {2.0}


class Clock:
    """Time passes with each call of what is repeated, and with each wait."""

    def __init__(self, call_seconds: float, wait_seconds: float = 0.0) -> None:
        self.seconds = 0.0
        self.num_calls = self.num_waits = 0
        self._call_seconds = call_seconds
        self._wait_seconds = wait_seconds

    def call(self) -> None:
        self.num_calls += 1
        self.seconds += self._call_seconds

    def wait(self) -> None:
        self.num_waits += 1
        self.seconds += self._wait_seconds

    def perf_counter(self) -> float:
        return self.seconds


@pytest.mark.parametrize("call_seconds", [2.0**-20, 2.0**-10, 2.0**-3])
def test_what_is_repeated_takes_the_time_and_waits_seldom(call_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(call_seconds)
    monkeypatch.setattr(turns, "time", clock)
    assert repeated(clock.call, 1.0, clock.wait) == 1 / call_seconds
    assert clock.seconds == 1.0
    # Twice as many calls between two waits each time, so up to 2^20 calls need about 20 waits.
    assert clock.num_waits <= 22


def test_the_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0, 0.25)
    monkeypatch.setattr(turns, "time", clock)
    rate = repeated(clock.call, 1.0, clock.wait)
    assert rate == clock.num_calls / clock.seconds
    assert 1.0 <= clock.seconds < 1.5


def test_what_takes_longer_than_the_turn_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(4.0)
    monkeypatch.setattr(turns, "time", clock)
    assert repeated(clock.call, 1.0) == 0.25


@pytest.mark.parametrize("num_drives", [0, 1, 2, 3, 8])
def test_however_many_drives_turns_take_less_than_a_minute(num_drives: int) -> None:
    effort = Effort().for_drives(num_drives)
    # Eight figures of the device, three of the host, five of each drive; the rest is for start and preparation.
    host = effort.rounds * 11 * effort.turn_seconds
    drive = effort.rounds * 5 * effort.drive_turn_seconds + effort.fill_seconds + effort.sustained_seconds
    assert host + num_drives * drive < 42
    assert effort.drive_turn_seconds * num_drives <= 2 * Effort().drive_turn_seconds or num_drives <= 2
