"""Successive halving on machines that only exist here: it keeps what it began with, or finds what is faster."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from zerooffload.train.tuning.halving import Halving, most_others, num_turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIRST = "first"
WORKLOADS: Mapping[str, Mapping[str, float]] = {
    "the first is best": {FIRST: 1.0, **{f"slower {number}": 1.05 + number / 10 for number in range(8)}},
    "one is much better": {FIRST: 2.0, **{f"like it {number}": 1.9 + number / 20 for number in range(7)}, "best": 1.0},
    "many are alike": {FIRST: 1.3, **{f"near {number}": 1.0 + number / 50 for number in range(8)}},
}
NOISE = 0.1
"""Standard deviation of a turn's logarithm."""
DRIFT = 3.0
"""By which all turns become slower in the course of a tuning."""
NUM_DRAWS = 50


class Machine:
    """Takes the workload's time for a step, times a drift that all feel, times noise."""

    def __init__(self, seconds: Mapping[str, float], seed: int, *, noise: float = NOISE) -> None:
        self._seconds, self._noise, self._random = seconds, noise, random.Random(seed)  # noqa: S311
        self.turns: list[str] = []

    def measure(self, one: str) -> float:
        self.turns.append(one)
        drift = DRIFT ** (len(self.turns) / num_turns(len(self._seconds) - 1))
        return self._seconds[one] * drift * self._random.lognormvariate(0, self._noise)


def found(machine: Machine, seconds: Mapping[str, float]) -> str:
    halving = Halving(FIRST, machine.measure)
    halving.begin()
    halving.run([name for name in seconds if name != FIRST])
    return halving.best()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_without_noise_the_best_of_all_is_found(workload: str) -> None:
    seconds = WORKLOADS[workload]
    assert found(Machine(seconds, 0, noise=0.0), seconds) == min(seconds, key=seconds.__getitem__)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_on_a_noisy_machine_it_ends_no_slower_than_it_began_and_near_the_best(workload: str) -> None:
    seconds = WORKLOADS[workload]
    best = [seconds[found(Machine(seconds, seed), seconds)] for seed in range(NUM_DRAWS)]
    assert max(best) <= seconds[FIRST]
    # Of all draws, nine in ten are within a tenth of what trying everything for ever would find.
    near = sum(one <= 1.1 * min(seconds.values()) for one in best)
    assert near >= 0.9 * NUM_DRAWS


def test_alike_configurations_stay_as_they_were() -> None:
    """By chance one is faster in three rounds of four now and then, and by little."""
    seconds = dict.fromkeys([FIRST, *"abcdefgh"], 1.0)
    kept = sum(found(Machine(seconds, seed), seconds) == FIRST for seed in range(NUM_DRAWS))
    assert kept >= NUM_DRAWS / 2


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 8, 13])
def test_turns_are_told_in_advance_and_the_first_has_one_in_every_round(number: int) -> None:
    seconds = {FIRST: 1.0, **{str(one): 2.0 + one for one in range(number)}}
    machine = Machine(seconds, 0, noise=0.0)
    found(machine, seconds)
    turns = Counter(machine.turns)
    assert sum(turns.values()) == num_turns(number)
    assert turns[FIRST] == max(turns.values())
    assert machine.turns[0] == FIRST
    assert most_others(num_turns(number)) == number
    if number > 1:
        assert turns["0"] > turns[str(number - 1)]


def test_nothing_replaces_the_first_after_two_rounds() -> None:
    halving = Halving(FIRST, lambda one: 2.0 if one == FIRST else _Stop.after(one, [1.0, 1.0]))
    _Stop.left.clear()
    halving.begin()
    with pytest.raises(KeyboardInterrupt):
        halving.run(["other"])
    assert halving.score("other") == 0.5
    assert halving.best() == FIRST


def test_what_was_found_before_an_interruption_counts() -> None:
    halving = Halving(FIRST, lambda one: 2.0 if one == FIRST else _Stop.after(one, [1.0, 1.0, 1.0]))
    _Stop.left.clear()
    halving.begin()
    with pytest.raises(KeyboardInterrupt):
        halving.run(["other"])
    assert halving.best() == "other"
    assert halving.seconds("other") == 1.0


class _Stop:
    """Somebody presses Ctrl-C."""

    left: dict[str, list[float]] = {}  # noqa: RUF012 - of one test at a time

    @classmethod
    def after(cls, one: str, turns: Sequence[float]) -> float:
        left = cls.left.setdefault(one, list(turns))
        if not left:
            raise KeyboardInterrupt
        return left.pop()


def test_what_cannot_run_is_tried_once() -> None:
    turns: list[str] = []

    def measure(one: str) -> float | None:
        turns.append(one)
        return {FIRST: 2.0, "fast": 1.0, "too large": None, "slow": 3.0}[one]

    halving = Halving(FIRST, measure)
    halving.begin()
    halving.run(["too large", "fast", "slow"])
    assert halving.best() == "fast"
    assert turns.count("too large") == 1
    assert halving.seconds("too large") is None
