"""A transfer that somebody waits for, and that tells when it was over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zerooffload.errors import TierIOError

if TYPE_CHECKING:
    from zerooffload.telemetry.waits import Waitable


class InFlight:
    """A ticket in front of another one.

    Parameters
    ----------
    over : callable
        Is given the time at which the last byte had moved, or the transfer had failed: once, by who waits first.
    """

    def __init__(self, ticket: Waitable, over: Callable[[float], None]) -> None:
        self._ticket = ticket
        self._over = over
        self._is_told = False

    def wait(self) -> None:
        """Block until it is over."""
        try:
            self._ticket.wait()
        except TierIOError:
            self._tell()
            raise
        self._tell()

    def done(self) -> bool:
        """Whether it is."""
        return self._ticket.done()

    @property
    def ended_seconds(self) -> float | None:
        """When its last byte had moved, as the engine saw it; None where it did not look."""
        ended: float | None = getattr(self._ticket, "ended_seconds", None)
        return ended

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            ended = self.ended_seconds
            self._over(time.perf_counter() if ended is None else ended)
