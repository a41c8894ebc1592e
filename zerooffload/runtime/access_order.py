"""Which hook points come next, learned from the last time. Pure.

[Note: a guess, never a rule]
Each kind of pass (training forward, backward, evaluation) has an order of its own. The order only says what to fetch
ahead and what to evict last. A surprise (a branch, an evaluation in between, generation) moves the position to where
the surprise occurs in the order, or leaves it alone: what is needed is fetched in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Pass(Enum):
    """A kind of walk over the model."""

    TRAIN_FORWARD = "training forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"


# One evaluation follows another, as one token follows another; what follows a backward waits for the update.
_FOLLOWS = {Pass.TRAIN_FORWARD: Pass.BACKWARD, Pass.EVALUATION: Pass.EVALUATION}


class AccessOrder:
    """The order of uses of each kind of pass.

    Parameters
    ----------
    forward : Sequence[str]
        A first guess: names in the order of the model. Backward is guessed as its reverse.
    """

    def __init__(self, forward: Sequence[str]) -> None:
        self._orders: dict[Pass, list[str]] = {
            Pass.TRAIN_FORWARD: list(forward),
            Pass.BACKWARD: list(reversed(forward)),
            Pass.EVALUATION: list(forward),
        }
        self._current: Pass | None = None
        self._seen: list[str] = []
        self._position = 0

    @property
    def current(self) -> Pass | None:
        """The pass under way."""
        return self._current

    def begin(self, kind: Pass) -> None:
        """A pass starts; one that was under way did not end as expected and teaches nothing."""
        self._current = kind
        self._seen = []
        self._position = 0

    def use(self, name: str) -> None:
        """`name` is used now."""
        if self._current is None:
            return
        self._seen.append(name)
        order = self._orders[self._current]
        for start, stop in ((self._position, len(order)), (0, self._position)):
            if name in order[start:stop]:
                self._position = order.index(name, start, stop) + 1
                return

    def end(self) -> None:
        """The pass is over; what was seen is the order from now on."""
        if self._current is not None and self._seen:
            self._orders[self._current] = self._seen
        self._current = None
        self._seen = []
        self._position = 0

    def of(self, kind: Pass) -> list[str]:
        """What is expected of a pass of that kind."""
        return list(self._orders[kind])

    def upcoming(self) -> list[str]:
        """What is expected next: the rest of this pass, and what follows it."""
        if self._current is None:
            return []
        follows = _FOLLOWS.get(self._current)
        rest = self._orders[self._current][self._position :]
        return rest if follows is None else rest + self._orders[follows]
