"""Which home each unit's states get: greedily, then bettered while something helps. Pure.

All begin where they cost least. While a tier holds more than its budget, that unit moves whose move costs the step
least for what it relieves (a multiple-choice knapsack with several constraints; the greedy rule by efficiency is that
of Sinha and Zoltners, "The multiple-choice knapsack problem", 1979). Afterwards any move, or a move together with what
makes room for it, is made that shortens the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerooffload.config import UpdateMode
from zerooffload.planner.cost import Speeds, StepKind
from zerooffload.planner.search.kinds import RESOURCES, Kind, Vector

Counts = list[NDArray[np.int64]]
"""For each kind, how many of its units have each combination of homes."""

_TIE = 1e-3
"""Of all seconds together, what counts beside those of the busiest resource: of plans that are as quick, the one that
asks for less."""
WORTH = 1e-3
"""Of a step: a smaller gain is none, and leaves states where they are."""
_MOST_REPAIRS = 64
_MOST_TRIED = 8
_MOST_BETTERINGS = 200
_READ, _WRITE, _CPU, _COMPUTE = (RESOURCES.index(name) for name in ("read", "write", "cpu", "compute"))


@dataclass(frozen=True)
class _Move:
    kind: int
    source: int
    target: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What is the same for all homes.

    Attributes
    ----------
    limits : ndarray, [3]
        Bytes that homes may take on each tier.
    window_tier : int
        From whose budget parameters in use are taken.
    forward_seconds, backward_seconds : float
        Of compute, in each pass.
    step : StepKind
    speeds : Speeds
    shares_host : bool
        Whether compute and the update have the same cores.
    """

    limits: Vector
    window_tier: int
    forward_seconds: float
    backward_seconds: float
    step: StepKind
    speeds: Speeds
    shares_host: bool


class HomeSearch:
    """The search over counts."""

    def __init__(self, kinds: Sequence[Kind], setting: Setting) -> None:
        self._kinds = kinds
        self._setting = setting
        self._tables = [
            np.array(
                [
                    np.concatenate(
                        [cost.nbytes, [cost.moving_nbytes], cost.first, cost.again, cost.backward, cost.update]
                    )
                    for cost in kind.costs
                ]
            )
            for kind in kinds
        ]

    def run(self) -> Counts | None:
        """The best that was found; None if nothing fits."""
        counts = self._cheapest()
        if not self._repair(counts, most=sum(len(kind.units) for kind in self._kinds) * 4):
            return None
        self._better(counts)
        return counts

    def seconds(self, counts: Counts) -> float:
        """What a step takes at least."""
        return float(self._seconds(self._totals(counts)[None])[0])

    def _cheapest(self) -> Counts:
        counts: Counts = []
        for kind, table in zip(self._kinds, self._tables, strict=True):
            costs = self._seconds(table * len(kind.units))
            chosen = np.zeros(len(kind.costs), dtype=np.int64)
            chosen[int(np.argmin(costs))] = len(kind.units)
            counts.append(chosen)
        return counts

    def _repair(self, counts: Counts, *, most: int) -> bool:
        """Move units until everything fits; whether it does."""
        for _ in range(most):
            totals = self._totals(counts)
            over = float(self._over(totals[None])[0])
            if over <= 0:
                return True
            moves = self._moves(counts)
            if not moves:
                return False
            after = totals + self._changes(moves)
            relief = over - self._over(after)
            cost = self._seconds(after) - self._seconds(totals[None])
            useful = relief > 1e-12
            if not useful.any():
                return False
            worth = np.where(useful, cost / np.maximum(relief, 1e-12), np.inf)
            self._make(counts, moves[int(np.argmin(worth))])
        return False

    def _better(self, counts: Counts) -> None:
        for _ in range(_MOST_BETTERINGS):
            if not self._better_once(counts):
                return

    def _better_once(self, counts: Counts) -> bool:
        totals = self._totals(counts)
        now = float(self._seconds(totals[None])[0])
        moves = self._moves(counts)
        if not moves:
            return False
        after = totals + self._changes(moves)
        seconds, over = self._seconds(after), self._over(after)
        fitting = np.where(over <= 0, seconds, np.inf)
        best = int(np.argmin(fitting))
        if fitting[best] < now * (1 - WORTH):
            self._make(counts, moves[best])
            return True
        wanted = [number for number in np.argsort(seconds) if over[number] > 0 and seconds[number] < now * (1 - WORTH)]
        return any(self._try_with_repair(counts, moves[number], now) for number in wanted[:_MOST_TRIED])

    def _try_with_repair(self, counts: Counts, move: _Move, now: float) -> bool:
        tried = [count.copy() for count in counts]
        self._make(tried, move)
        if not self._repair(tried, most=_MOST_REPAIRS) or self.seconds(tried) >= now * (1 - WORTH):
            return False
        for count, other in zip(counts, tried, strict=True):
            count[:] = other
        return True

    def _moves(self, counts: Counts) -> list[_Move]:
        return [
            _Move(kind, int(source), target)
            for kind, count in enumerate(counts)
            for source in np.flatnonzero(count)
            for target in range(len(count))
            if target != source
        ]

    def _changes(self, moves: Sequence[_Move]) -> NDArray[np.float64]:
        return np.array([self._tables[move.kind][move.target] - self._tables[move.kind][move.source] for move in moves])

    @staticmethod
    def _make(counts: Counts, move: _Move) -> None:
        counts[move.kind][move.source] -= 1
        counts[move.kind][move.target] += 1

    def _totals(self, counts: Counts) -> Vector:
        parts = [count @ table for count, table in zip(counts, self._tables, strict=True)]
        return np.sum(parts, axis=0) if parts else np.zeros(0)

    def _over(self, totals: NDArray[np.float64]) -> Vector:
        """By how much budgets are exceeded, in budgets; `totals` is [plans, features]."""
        limits = self._setting.limits
        return np.asarray((np.maximum(0.0, totals[:, :3] - limits) / np.maximum(limits, 1.0)).sum(axis=1))

    def _seconds(self, totals: NDArray[np.float64]) -> Vector:
        """Of each of several plans; see docs/overlap.md."""
        setting, step = self._setting, self._setting.step
        first, again, backward, update = np.split(totals[:, 4:], 4, axis=1)
        away = 1 - self._held_part(totals)[:, None]
        forward, back = np.zeros_like(first), np.zeros_like(first)
        forward[:, _COMPUTE] += setting.forward_seconds
        back[:, _COMPUTE] += setting.backward_seconds
        first_forward = first + forward
        one_backward = away * again + backward / step.accumulation + back
        others = (step.accumulation - 1) * (away * again + forward + one_backward)
        match step.schedule:
            case UpdateMode.AFTER_BACKWARD:
                parts = [first_forward + one_backward + others, update]
            case UpdateMode.UNDER_NEXT_FORWARD:
                parts = [first_forward + update, one_backward + others]
            case UpdateMode.DURING_BACKWARD:
                parts = [first_forward + one_backward + update, others]
        return np.asarray(np.sum([self._busiest(part) for part in parts], axis=0))

    def _held_part(self, totals: NDArray[np.float64]) -> Vector:
        tier, moving = self._setting.window_tier, totals[:, 3]
        room = np.maximum(0.0, self._setting.limits[tier] - totals[:, tier])
        return np.where(moving > 0, np.minimum(1.0, room / np.maximum(moving, 1.0)), 1.0)

    def _busiest(self, part: NDArray[np.float64]) -> Vector:
        read, write = part[:, _READ], part[:, _WRITE]
        together = 2 * np.minimum(read, write)
        drive = read + write - together + together / self._setting.speeds.drive_mix
        cores = part[:, _CPU] + part[:, _COMPUTE] if self._setting.shares_host else part[:, _CPU]
        busiest = np.max(np.stack([drive, cores, *part.T]), axis=0)
        return np.asarray(busiest + _TIE * part.sum(axis=1))
