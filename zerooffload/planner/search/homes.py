"""Which home each unit's states get: greedily, then bettered while something helps. Pure.

All begin where they cost least. While a tier holds more than its budget, that unit moves whose move costs the step
least for what it relieves (a multiple-choice knapsack with several constraints; the greedy rule by efficiency is that
of Sinha and Zoltners, "The multiple-choice knapsack problem", 1979); units of a kind move together while that move
stays the one. Afterwards any move, or a move together with what makes room for it, is made that shortens the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerooffload.config import UpdateMode
from zerooffload.planner.cost import Speeds, StepKind
from zerooffload.planner.search.kinds import RESOURCES, TIERS, HomeCost, Kind, Vector
from zerooffload.planner.search.passes import PassCosts

Counts = list[NDArray[np.int64]]
"""For each kind, how many of its units have each combination of homes."""


class Best(NamedTuple):
    """What a search has found: what homes then take of each tier, [3], and what a step does, as it counts."""

    counts: Counts
    nbytes: Vector
    seconds: float


_TIE = 1e-3
"""Of all seconds together, what counts beside those of the busiest resource: of plans that are as quick, the one that
asks for less."""
WORTH = 1e-3
"""Of a step: a smaller gain is none, and leaves states where they are."""
_LEAST_RELIEF = 1e-12
_MOST_REPAIRS = 64
_MOST_TRIED = 8
_MOST_BETTERINGS = 200
_READ, _WRITE, _CPU, _COMPUTE = (RESOURCES.index(name) for name in ("read", "write", "cpu", "compute"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What is the same for all homes.

    Attributes
    ----------
    limits : ndarray, [3]
        Bytes that homes may take on each tier.
    window_tier : int
        From whose budget parameters in use are taken.
    passes : PassCosts
    step : StepKind
    speeds : Speeds
    shares_host : bool
        Whether compute and the update have the same cores.
    """

    limits: Vector
    window_tier: int
    passes: PassCosts
    step: StepKind
    speeds: Speeds
    shares_host: bool


class _Part(NamedTuple):
    """A part of a step beside which no other runs: how often each of `HomeCost` and `PassCosts` is in it.

    `again` is what comes again unless the window holds it.
    """

    first: float
    backward: float
    update: float
    again: float
    forwards: int
    backwards: int


def _parts_of(step: StepKind) -> tuple[_Part, _Part]:
    """See docs/overlap.md."""
    num, others = step.accumulation, step.accumulation - 1
    match step.schedule:
        case UpdateMode.AFTER_BACKWARD:
            return _Part(1, 1, 0, 1 + 2 * others, num, num), _Part(0, 0, 1, 0, 0, 0)
        case UpdateMode.UNDER_NEXT_FORWARD:
            return _Part(1, 0, 1, 0, 1, 0), _Part(0, 1, 0, 1 + 2 * others, others, num)
        case UpdateMode.DURING_BACKWARD:
            return _Part(1, 1 / num, 1, 1, 1, 1), _Part(0, others / num, 0, 2 * others, others, others)


class HomeSearch:
    """The search over counts: of all kinds in one vector here, with a column of what each costs.

    A column has bytes of each tier, bytes that move, and seconds of each resource in each part of a step: those that
    are spent anyway, then those of what comes again.
    """

    def __init__(self, kinds: Sequence[Kind], setting: Setting) -> None:
        self._setting = setting
        self._num_units = [len(kind.units) for kind in kinds]
        self._places = np.cumsum([0, *(len(kind.costs) for kind in kinds)])
        parts = _parts_of(setting.step)
        passes = setting.passes
        of_parts = [part.forwards * passes.forward + part.backwards * passes.backward for part in parts]
        self._passes = np.array(of_parts)[:, :, None]
        columns = [_column(cost, parts) for kind in kinds for cost in kind.costs]
        self._costs = np.array(columns).reshape(len(columns), len(TIERS) + 1 + 2 * self._passes.size).T
        pairs = [pair for start, stop in pairwise(self._places) for pair in permutations(range(start, stop), 2)]
        # Of each move of a unit, the place that it leaves and the one that it takes.
        self._sources, self._targets = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._changes = self._costs[:, self._targets] - self._costs[:, self._sources]
        self._limits = setting.limits[:, None]
        self._budgets = np.maximum(self._limits, 1.0)

    def run(self) -> Best | None:
        """The best that was found; None if nothing fits."""
        counts = self._cheapest()
        if not self._repair(counts, most=self._places[-1] * sum(self._num_units)):
            return None
        self._better(counts)
        totals = self._totals(counts)
        of_kinds = [counts[start:stop] for start, stop in pairwise(self._places)]
        return Best(of_kinds, totals[: len(TIERS)], float(self._seconds(totals[:, None])[0]))

    def _cheapest(self) -> NDArray[np.int64]:
        counts = np.zeros(self._places[-1], dtype=np.int64)
        for num_units, (start, stop) in zip(self._num_units, pairwise(self._places), strict=True):
            seconds = self._seconds(self._costs[:, start:stop] * num_units)
            counts[start + int(np.argmin(seconds))] = num_units
        return counts

    def _repair(self, counts: NDArray[np.int64], *, most: int) -> bool:
        """Move units until everything fits; whether it does. At most so many."""
        last, times = -1, 1
        while most > 0:
            found = self._most_efficient(counts)
            if found is None:
                return self._fits(counts)
            move, num_needed = found
            possible = min(most, num_needed, int(counts[self._sources[move]]))
            times = min(possible, 2 * times) if move == last else 1
            while times > 1 and not self._stays_most_efficient(counts, move, times):
                times //= 2
            self._make(counts, move, times)
            last, most = move, most - times
        return self._fits(counts)

    def _most_efficient(self, counts: NDArray[np.int64]) -> tuple[int, int] | None:
        """The move whose cost is least for what it relieves, and how many like it relieve all.

        None if there is nothing to relieve, or no move that does.
        """
        totals = self._totals(counts)
        over = float(self._over(totals[:, None])[0])
        if over <= 0:
            return None
        moves = self._possible(counts)
        relief = over - self._over(totals[:3, None] + self._changes[:3, moves])
        useful = (relief > _LEAST_RELIEF).nonzero()[0]
        if not len(useful):
            return None
        moves, relief = moves[useful], relief[useful]
        seconds = self._seconds(self._with_each(totals, moves))
        best = int(((seconds[1:] - seconds[0]) / relief).argmin())
        return int(moves[best]), ceil(over / relief[best])

    def _stays_most_efficient(self, counts: NDArray[np.int64], move: int, times: int) -> bool:
        """Whether a move that is the most efficient one is still, before it is made for the last of so many times."""
        later = counts.copy()
        self._make(later, move, times - 1)
        found = self._most_efficient(later)
        return found is not None and found[0] == move

    def _fits(self, counts: NDArray[np.int64]) -> bool:
        return bool(self._over(self._totals(counts)[:, None])[0] <= 0)

    def _better(self, counts: NDArray[np.int64]) -> None:
        for _ in range(_MOST_BETTERINGS):
            if not self._better_once(counts):
                return

    def _better_once(self, counts: NDArray[np.int64]) -> bool:
        moves = self._possible(counts)
        plans = self._with_each(self._totals(counts), moves)
        over, seconds = self._over(plans), self._seconds(plans)
        worthwhile = seconds[0] * (1 - WORTH)
        fitting = np.where(over[1:] <= 0, seconds[1:], np.inf)
        if fitting.min(initial=np.inf) < worthwhile:
            self._make(counts, int(moves[np.argmin(fitting)]))
            return True
        quicker = [move for move in np.argsort(seconds[1:]) if over[1 + move] > 0 and seconds[1 + move] < worthwhile]
        return any(self._try_with_repair(counts, int(moves[move]), worthwhile) for move in quicker[:_MOST_TRIED])

    def _try_with_repair(self, counts: NDArray[np.int64], move: int, worthwhile: float) -> bool:
        tried = counts.copy()
        self._make(tried, move)
        if not self._repair(tried, most=_MOST_REPAIRS):
            return False
        if self._seconds(self._totals(tried)[:, None])[0] >= worthwhile:
            return False
        counts[:] = tried
        return True

    def _possible(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Moves of which there is a unit to move."""
        return counts[self._sources].nonzero()[0]

    def _with_each(self, totals: Vector, moves: NDArray[np.int64]) -> Vector:
        """Of a plan without a move and with each of these, a column of totals."""
        plans = np.empty((len(totals), 1 + len(moves)))
        plans[:, 0] = totals
        np.add(totals[:, None], self._changes[:, moves], out=plans[:, 1:])
        return plans

    def _make(self, counts: NDArray[np.int64], move: int, times: int = 1) -> None:
        counts[self._sources[move]] -= times
        counts[self._targets[move]] += times

    def _totals(self, counts: NDArray[np.int64]) -> Vector:
        return np.asarray(self._costs @ counts)

    def _over(self, plans: Vector) -> Vector:
        """By how much each of several plans exceeds budgets, in budgets."""
        return np.asarray(np.add.reduce(np.maximum(0.0, plans[:3] - self._limits) / self._budgets, axis=0))

    def _seconds(self, plans: Vector) -> Vector:
        """Of each of several plans; see docs/overlap.md."""
        anyway, again = plans[4:].reshape(2, *self._passes.shape[:2], -1)
        parts = anyway + self._passes + again * (1 - self._held_part(plans))
        return np.asarray(np.add.reduce(self._busiest(parts), axis=0))

    def _held_part(self, plans: Vector) -> Vector:
        tier, moving = self._setting.window_tier, plans[3]
        room = np.maximum(0.0, self._setting.limits[tier] - plans[tier])
        return np.where(moving > 0, np.minimum(1.0, room / np.maximum(moving, 1.0)), 1.0)

    def _busiest(self, parts: Vector) -> Vector:
        """Seconds of parts, [parts, plans], from those of each resource, [parts, resources, plans]."""
        read, write = parts[:, _READ], parts[:, _WRITE]
        together = 2 * np.minimum(read, write)
        drive = read + write - together + together / self._setting.speeds.drive_mix
        cores = parts[:, _CPU] + parts[:, _COMPUTE] if self._setting.shares_host else parts[:, _CPU]
        busiest = np.maximum(np.maximum(drive, cores), np.maximum.reduce(parts, axis=1))
        return np.asarray(busiest + _TIE * np.add.reduce(parts, axis=1))


def _column(cost: HomeCost, parts: Sequence[_Part]) -> Vector:
    anyway = [part.first * cost.first + part.backward * cost.backward + part.update * cost.update for part in parts]
    again = [part.again * cost.again for part in parts]
    return np.concatenate([cost.nbytes, [cost.moving_nbytes], *anyway, *again])
