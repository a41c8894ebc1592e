"""Waits of which one is taken out."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from zerooffload.accelerator import Event, Stream
from zerooffload.telemetry import Recorder, Wait, Waitable, Waits

# Places that pass a wait on for somebody else.
_PASSING_ON = {"waits.py", "transfers.py", Path(__file__).name}


class LeakyWaits(Waits):
    """Performs every wait but one.

    Parameters
    ----------
    leak : Wait
        The one that is not performed.
    at : str, optional
        Only where it is performed by this function: "module.function".

    Attributes
    ----------
    leaked : Counter[str]
        How often it was left out, by function.
    """

    def __init__(self, recorder: Recorder, leak: Wait, at: str | None = None) -> None:
        super().__init__(recorder)
        self._leak = leak
        self._at = at
        self.leaked: Counter[str] = Counter()

    def until(self, cause: Wait, waitable: Waitable) -> None:
        """See `Waits`."""
        if not self._leaks(cause):
            super().until(cause, waitable)

    def order(self, cause: Wait, stream: Stream, event: Event) -> None:
        """See `Waits`."""
        if not self._leaks(cause):
            super().order(cause, stream, event)

    def _leaks(self, cause: Wait) -> bool:
        if cause is not self._leak:
            return False
        site = _caller()
        if self._at is not None and site != self._at:
            return False
        self.leaked[site] += 1
        return True


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).name in _PASSING_ON:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
