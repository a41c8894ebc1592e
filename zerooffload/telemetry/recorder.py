"""Counters of one run: bytes by link, seconds by cause. `Recorder` itself is the one that keeps nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum


class Link(StrEnum):
    """A way that bytes take between tiers."""

    NVME_READ = "nvme_read"
    NVME_WRITTEN = "nvme_written"
    COPY_IN = "copy_in"
    COPY_OUT = "copy_out"
    GATHERED = "gathered"
    REDUCED = "reduced"


class Work(StrEnum):
    """Work of ours on the thread that trains."""

    UPDATE_KERNEL = "update kernel"
    GRADIENT_ACCUMULATION = "gradient accumulation"
    GRADIENT_NORM = "gradient norm"


class Recorder:
    """What the parts of a run report to. This one ignores everything and costs nothing."""

    def moved(self, link: Link, nbytes: int) -> None:
        """`nbytes` were sent over `link`."""

    def waited(self, cause: str, seconds: float) -> None:
        """The training thread stood still for `cause`."""

    def worked(self, work: Work, seconds: float) -> None:
        """The training thread did work of ours."""

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """What the calling thread does inside is hidden behind the thread that trains."""
        yield

    @contextmanager
    def working(self, work: Work) -> Iterator[None]:  # noqa: ARG002 - for who keeps it
        """A block is `work`, but for what in it is waiting or other work."""
        yield


class _Inner(threading.local):
    """Seconds of a thread that are accounted for, within the block of work that it is in."""

    seconds = 0.0


@dataclass(frozen=True)
class Counts:
    """What a recorder has counted.

    Attributes
    ----------
    bytes_moved : dict[str, int]
        By link.
    waits, work, hidden_work : dict[str, float]
        Seconds: in which the thread that trains waited, by cause; in which it did work of ours, by kind; and in which
        others did.
    """

    bytes_moved: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    hidden_work: dict[str, float] = field(default_factory=dict)


class CountingRecorder(Recorder):
    """Adds up, from any thread.

    [Note: each second counts once]
    Work contains waits and other work: gradients are accumulated in a buffer that, once full, is sent home, where they
    are normed. Each is counted without those inside it, so that all of them and compute add up to the step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inner = _Inner()
        self._bytes: Counter[str] = Counter()
        self._waits: dict[str, float] = {}
        self._work: dict[str, float] = {}
        self._hidden: dict[str, float] = {}
        self._background: set[int] = set()

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Its waits stop nobody, and its work is counted apart."""
        self._background.add(threading.get_ident())
        try:
            yield
        finally:
            self._background.discard(threading.get_ident())

    def moved(self, link: Link, nbytes: int) -> None:
        """Add to the link's bytes."""
        with self._lock:
            self._bytes[link.value] += nbytes

    def waited(self, cause: str, seconds: float) -> None:
        """Add to the cause's seconds."""
        self._inner.seconds += seconds
        if threading.get_ident() in self._background:
            return
        with self._lock:
            self._waits[cause] = self._waits.get(cause, 0.0) + seconds

    def worked(self, work: Work, seconds: float) -> None:
        """Add to the work's seconds."""
        with self._lock:
            seconds_of = self._hidden if threading.get_ident() in self._background else self._work
            seconds_of[work.value] = seconds_of.get(work.value, 0.0) + seconds

    @contextmanager
    def working(self, work: Work) -> Iterator[None]:
        """Time a block as `work`, without what in it counts already."""
        begin, outer = time.perf_counter(), self._inner.seconds
        self._inner.seconds = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.worked(work, seconds - self._inner.seconds)
            self._inner.seconds = outer + seconds

    def take(self) -> Counts:
        """All since the last call."""
        with self._lock:
            bytes_moved = {link.value: self._bytes[link.value] for link in Link}
            taken = Counts(bytes_moved, self._waits, self._work, self._hidden)
            self._bytes, self._waits, self._work, self._hidden = Counter(), {}, {}, {}
        return taken
