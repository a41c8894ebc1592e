"""Waiting for an operation, with a watchdog: a drive that does not answer is told about, and never a silent hang."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from zerooffload.errors import InternalError, TierIOError
from zerooffload.formats import format_seconds

_log = logging.getLogger("zerooffload")


@dataclass(frozen=True)
class Operation:
    """What was submitted.

    Attributes
    ----------
    kind : str
        "read", "write" or "flush".
    path : pathlib.Path
    offset_bytes, length_bytes : int
    """

    kind: str
    path: Path
    offset_bytes: int = 0
    length_bytes: int = 0

    def failure(self, errno: int, transferred_bytes: int = 0, advice: str = "") -> TierIOError:
        """The error to raise for it."""
        return TierIOError(
            self.kind,
            self.path,
            errno,
            offset_bytes=self.offset_bytes,
            length_bytes=self.length_bytes,
            transferred_bytes=transferred_bytes,
            advice=advice,
        )

    def __str__(self) -> str:
        if not self.length_bytes:
            return f"{self.kind} of {self.path}"
        return f"{self.kind} of {self.length_bytes} bytes at offset {self.offset_bytes} of {self.path}"


class Ticket:
    """An operation in flight. An engine says how it ends in `_ends_within` and `_has_ended`.

    Attributes
    ----------
    slow_after_seconds : float
        A wait that lasts longer is warned about, and again each time that it has lasted twice as long.
    ended_seconds : float or None
        When the last byte had moved, on the clock of `time.perf_counter`, however late that is waited for. None before
        a wait, after a failure, and where the engine cannot tell.
    """

    slow_after_seconds = 30.0

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._owner = os.getpid()
        # Reentrant: the garbage collector may end a run, which waits, in the middle of a wait.
        self._turn = threading.RLock()
        self._is_over = False
        self.ended_seconds: float | None = None
        self._failure: TierIOError | None = None

    def wait(self) -> None:
        """Block, without the interpreter lock; raise `TierIOError` for anything but success, each time."""
        with self._turn:
            if not self._is_over:
                try:
                    # Interrupted by Ctrl-C, the operation is still under way and can be waited for again.
                    self._wait()
                except TierIOError as failure:
                    self._failure = failure
                self._is_over = True
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        """Ask without blocking."""
        return self._is_over or self._has_ended()

    def _wait(self) -> None:
        refuse_in_child(self._owner)
        start, patience_seconds = time.monotonic(), self.slow_after_seconds
        while not self._ends_within(patience_seconds):
            patience_seconds = time.monotonic() - start
            _log.warning("the %s has taken %s so far", self._operation, format_seconds(patience_seconds))

    def _ends_within(self, seconds: float) -> bool:
        """Block until it has ended, but no longer than this; raise `TierIOError` if it failed."""
        raise NotImplementedError

    def _has_ended(self) -> bool:
        raise NotImplementedError


def refuse_in_child(owner: int) -> None:
    """Raise `InternalError` in a process forked from the one that an engine belongs to: its threads are not here."""
    if os.getpid() != owner:
        raise InternalError(
            f"this I/O engine belongs to process {owner}, of which this one was forked: make an engine of its own here"
        )
