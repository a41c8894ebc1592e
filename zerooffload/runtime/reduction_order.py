"""In which order gradients are reduced when there are several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable


class ReductionOrder:
    """Which flats depart when there are several ranks: in the model's reverse order, each once in each backward.

    The root's depart last: of what lies outside of all blocks some is used before them and some behind them, so its
    gradients may be complete at the end alone, and others must not wait for them. A plan has room for them beside those
    of any other unit.

    Parameters
    ----------
    units : Sequence[Unit]
        In the order of the model, the root last.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        *inner, root = units
        self._flats = [flat for unit in (*reversed(inner), root) for flat in trainable(unit)]
        self._complete: set[int] = set()
        self._next = 0

    def complete(self, part: UnitFlat) -> Iterator[tuple[UnitFlat, TrainingStates]]:
        """All gradients of `part` have arrived: what departs now."""
        self._complete.add(id(part))
        while self._next < len(self._flats) and id(self._flats[self._next][0]) in self._complete:
            self._next += 1
            yield self._flats[self._next - 1]

    def rest(self) -> Iterator[tuple[UnitFlat, TrainingStates]]:
        """What has not departed when backward ends; afterwards a new backward may begin."""
        rest, self._next, self._complete = self._flats[self._next :], 0, set()
        yield from rest
