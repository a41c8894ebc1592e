"""Whether what is measured step by step has left for good what it was. Pure.

[Note: when a figure has shifted]
What a figure was is the median m of reference steps; how it scatters, s = 1.4826 x the median of |x - m|: the standard
deviation of what is normal, and a few slow steps do not move it (Rousseeuw and Croux, "Alternatives to the Median
Absolute Deviation", 1993). By chance the medians of n and of k such steps differ with a standard error of
e = 1.2533 s sqrt(1/n + 1/k). A figure has shifted when the median of WINDOW_STEPS steps lies more than ERRORS x e from
m, and more than LEAST_PART x m, on the same side in two windows in a row that share no step.

What is normal passes four errors once in 16,000 windows. But 16 steps tell s by half too small in one of 27 runs: so
two windows are asked for, and windows that lie where the figure was join the reference. Runs of 400 steps without a
shift, 1,000 of each: steps that scatter by a fifth raised no alarm, steps of which one in ten takes five times as long
1, and skewed ones (log-normal, 0.3) 3. A doubling is found if s is less than half of m, a halving if less than a
quarter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

WINDOW_STEPS = 8
REFERENCE_STEPS = 2 * WINDOW_STEPS
"""At first: as many as it takes to find a shift, whose steps are the next reference."""
MOST_REFERENCE_STEPS = 8 * WINDOW_STEPS
ERRORS = 4.0
LEAST_PART = 0.1
_DEVIATION_OF_NORMAL = 1.4826
_ERROR_OF_MEDIAN = 1.2533


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Figures have left what they were.

    Attributes
    ----------
    names : tuple[str, ...]
        Those that are watched, and have.
    before, now : Mapping[str, float]
        Of every figure, the median.
    noise : Mapping[str, float]
        Of every figure, what it may differ by from `before` by chance.
    """

    names: tuple[str, ...]
    before: Mapping[str, float]
    now: Mapping[str, float]
    noise: Mapping[str, float]

    def differs(self, name: str) -> bool:
        """Whether a figure is another one than before."""
        return abs(self.now[name] - self.before[name]) > self.noise[name]


class DriftWatch:
    """Watches figures; see the note. Of noise alone it makes nothing.

    Parameters
    ----------
    watched : Sequence[str]
        The figures whose shift counts; others are told with it.
    """

    def __init__(self, watched: Sequence[str]) -> None:
        self._watched = watched
        self._reference: list[Mapping[str, float]] = []
        self._window: list[Mapping[str, float]] = []
        # The window before, if it lay elsewhere, and on which side each watched figure of it did; 0 for neither.
        self._pending: list[Mapping[str, float]] = []
        self._sides: dict[str, int] = {}

    def add(self, step: Mapping[str, float]) -> Shift | None:
        """Another step's figures, by name: the same names in each."""
        if len(self._reference) < REFERENCE_STEPS:
            self._reference.append(step)
            return None
        self._window.append(step)
        if len(self._window) < WINDOW_STEPS:
            return None
        window, self._window = self._window, []
        before, noise = _medians(self._reference), self.noise
        now = _medians(window)
        sides = {name: _side(now[name] - before[name], noise[name]) for name in self._watched}
        shifted = tuple(name for name, side in sides.items() if side and side == self._sides.get(name))
        if shifted:
            self._reference, self._pending, self._sides = [*self._pending, *window], [], {}
            return Shift(names=shifted, before=before, now=_medians(self._reference), noise=noise)
        is_elsewhere = any(sides.values())
        self._pending, self._sides = (window, sides) if is_elsewhere else ([], {})
        if not is_elsewhere and len(self._reference) < MOST_REFERENCE_STEPS:
            self._reference += window
        return None

    @property
    def before(self) -> Mapping[str, float] | None:
        """What the figures are; None before enough steps tell."""
        return _medians(self._reference) if len(self._reference) >= REFERENCE_STEPS else None

    @property
    def noise(self) -> Mapping[str, float]:
        """What a window's medians may differ by from `before` by chance."""
        return {name: _noise([step[name] for step in self._reference]) for name in self._reference[0]}


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(step[name] for step in steps) for name in steps[0]}


def _noise(values: Sequence[float]) -> float:
    middle = median(values)
    deviation = _DEVIATION_OF_NORMAL * median(abs(value - middle) for value in values)
    error = _ERROR_OF_MEDIAN * deviation * sqrt(1 / len(values) + 1 / WINDOW_STEPS)
    return max(ERRORS * error, LEAST_PART * middle)


def _side(difference: float, noise: float) -> int:
    return 0 if abs(difference) <= noise else 1 if difference > 0 else -1
