"""Which of some configurations is the fastest, found by trying the slow ones less. Pure.

Successive halving: all are tried a little; the better half is tried twice as much, and so on. Jamieson and Talwalkar,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016.

[Note: a round is compared with itself]
What else a machine does slows trials by more than configurations differ. So trials go in rounds, in which each
configuration has one turn, the first one among them always; every other round goes backwards. A turn counts as a part
of what the first one took in the same round, and a configuration as the median of its turns. Nothing replaces the first
that was not faster in three rounds of four, and tried in three at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

C = TypeVar("C")
_LEAST_ROUNDS = 3
"""Of what replaces the first."""
_LAST_ROUNDS = 5
"""Of what is left in the end."""
_FASTER_PART = 0.75
"""Of its rounds."""


def rungs(num_others: int) -> Iterator[tuple[int, int]]:
    """How many beside the first are tried until how many rounds are done in all."""
    num_rounds = 1
    while num_others > 1:
        yield num_others, num_rounds
        num_others, num_rounds = num_others // 2, 2 * num_rounds
    if num_others:
        yield 1, max(num_rounds, _LAST_ROUNDS)


def num_turns(num_others: int) -> int:
    """Turns of a halving of so many beside the first."""
    turns, done = 0, 0
    for number, num_rounds in rungs(num_others):
        turns += (num_rounds - done) * (number + 1)
        done = num_rounds
    return max(1, turns)


def most_others(turns: float) -> int:
    """How many beside the first so many turns are enough for."""
    number = 0
    while num_turns(number + 1) <= turns:
        number += 1
    return number


class Halving(Generic[C]):
    """A halving that can be left, by an exception of `measure`, at any time.

    Parameters
    ----------
    first : C
        What is kept unless something is faster.
    measure : Callable[[C], float | None]
        A turn: seconds of a step; None if it cannot run, and is not tried any more.
    """

    def __init__(self, first: C, measure: Callable[[C], float | None]) -> None:
        self._first = first
        self._measure = measure
        self._rounds: list[dict[C, float]] = []
        self._failed: set[C] = set()

    def begin(self) -> None:
        """Give the first its turn of the first round."""
        self._rounds.append({})
        self._turn(self._first)

    def run(self, others: Sequence[C]) -> None:
        """Give the others theirs, and all the further rounds. They differ; the most promising comes first."""
        self._go_round(others)
        for number, num_rounds in rungs(len(others)):
            able = [one for one in others if one not in self._failed]
            # What was tried alike is compared: those of the last round.
            others = sorted(able, key=self.score)[:number]
            while others and len(self._rounds) < num_rounds:
                self._rounds.append({})
                self._go_round(others)

    def score(self, one: C) -> float:
        """Seconds of a step, as a part of the first one's; infinite for what was not tried."""
        return statistics.median(self._parts(one) or [float("inf")])

    def best(self) -> C:
        """The fastest as far as is known."""
        tried = dict.fromkeys(one for turns in self._rounds for one in turns)
        return min((one for one in tried if self._is_faster(one)), key=self.score, default=self._first)

    def seconds(self, one: C) -> float | None:
        """The median of its turns; None if it had none."""
        turns = [turns[one] for turns in self._rounds if one in turns]
        return statistics.median(turns) if turns else None

    def _is_faster(self, one: C) -> bool:
        parts = self._parts(one)
        num_faster = sum(part < 1 for part in parts)
        return len(parts) >= _LEAST_ROUNDS and num_faster >= _FASTER_PART * len(parts) and self.score(one) < 1

    def _parts(self, one: C) -> list[float]:
        both = [turns for turns in self._rounds if one in turns and self._first in turns]
        return [turns[one] / turns[self._first] for turns in both]

    def _go_round(self, others: Sequence[C]) -> None:
        order = [self._first, *others]
        for one in order[::-1] if len(self._rounds) % 2 == 0 else order:
            if one not in self._rounds[-1] and one not in self._failed:
                self._turn(one)

    def _turn(self, one: C) -> None:
        seconds = self._measure(one)
        if seconds is None:
            self._failed.add(one)
        else:
            self._rounds[-1][one] = seconds
