"""Counters of one run: bytes by link, seconds by cause. `Recorder` itself is the one that keeps nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
    def working(self, work: Work) -> Iterator[None]:
        """Time a block as `work`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.worked(work, time.perf_counter() - begin)


class CountingRecorder(Recorder):
    """Adds up, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._waits: dict[str, float] = {}
        self._work: dict[str, float] = {}

    def moved(self, link: Link, nbytes: int) -> None:
        """Add to the link's bytes."""
        with self._lock:
            self._bytes[link.value] += nbytes

    def waited(self, cause: str, seconds: float) -> None:
        """Add to the cause's seconds."""
        with self._lock:
            self._waits[cause] = self._waits.get(cause, 0.0) + seconds

    def worked(self, work: Work, seconds: float) -> None:
        """Add to the work's seconds."""
        with self._lock:
            self._work[work.value] = self._work.get(work.value, 0.0) + seconds

    def take(self) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
        """Bytes by link, seconds waited by cause, seconds worked by kind since the last call."""
        with self._lock:
            taken = ({link.value: self._bytes[link.value] for link in Link}, self._waits, self._work)
            self._bytes, self._waits, self._work = Counter(), {}, {}
        return taken
