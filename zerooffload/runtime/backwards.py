"""Which backward is the last before the update: what was said, or what the steps before did. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BackwardCount:
    """Counts the backwards since gradients were last used or forgotten.

    Its owner calls, in the order of the user's loop:

    1. `begin` when a backward begins;
    2. `updated` when an optimizer has stepped, or skipped its step;
    3. `discarded` when gradients are forgotten that no step has used.

    Parameters
    ----------
    accumulation_steps : int or None
        How many backwards add up before each update; None if that was not said.
    """

    def __init__(self, accumulation_steps: int | None = None) -> None:
        self._accumulation_steps = accumulation_steps
        self._num_backwards = 0
        self._depth = 0
        # Of this step, and of the one before.
        self._marked = False
        self._marked_before = False
        self._history: tuple[int, ...] = ()

    @property
    def num_backwards(self) -> int:
        """Backwards that have begun since the last update."""
        return self._num_backwards

    @property
    def expects_more(self) -> bool:
        """Whether the user has said, with `more_follow`, that more backwards come after those that begin now."""
        return self._depth > 0

    @contextmanager
    def more_follow(self) -> Iterator[None]:
        """A backward inside is not the last before the update. May be nested."""
        self._depth += 1
        self._marked = True
        try:
            yield
        finally:
            self._depth -= 1

    def begin(self) -> None:
        """One more backward."""
        self._num_backwards += 1

    def updated(self) -> None:
        """The gradients were used. Without a backward since then (a second optimizer steps) nothing changes."""
        if self._num_backwards:
            self._history = (*self._history[-1:], self._num_backwards)
            self._start_afresh()

    def discarded(self) -> None:
        """The gradients were forgotten; how many backwards they were of says nothing about other steps."""
        if self._num_backwards:
            self._start_afresh()

    def is_last_expected(self) -> bool | None:
        """Whether the backward that began last is expected to be the last before the update.

        What is said about single backwards (`more_follow`, in this step or in the one before) counts first, then
        `accumulation_steps`. If neither was given, and the last two steps had the same number of backwards, this one is
        expected to have as many.

        Returns
        -------
        bool or None
            None if there is nothing to go by: no backward has begun, or more than the expected number.
        """
        if not self._num_backwards:
            return None
        if self._depth:
            return False
        if self._marked or self._marked_before:
            return True
        expected = self._accumulation_steps or self._usual_number()
        if expected is None or self._num_backwards > expected:
            return None
        return self._num_backwards == expected

    def _usual_number(self) -> int | None:
        return self._history[0] if len(self._history) == 2 and len(set(self._history)) == 1 else None

    def _start_afresh(self) -> None:
        self._num_backwards = 0
        self._marked, self._marked_before = self._depth > 0, self._marked
