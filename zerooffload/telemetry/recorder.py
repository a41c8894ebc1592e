"""What the parts of a run report to: bytes by link, seconds by cause, spans by lane."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from zerooffload.accelerator import Stream
from zerooffload.telemetry.in_flight import InFlight
from zerooffload.telemetry.spans import Lane, covered_seconds

if TYPE_CHECKING:
    from zerooffload.telemetry.report import StepReport
    from zerooffload.telemetry.waits import Waitable

_NOTHING = nullcontext()


class Link(StrEnum):
    """A way that bytes take between tiers."""

    NVME_READ = "nvme_read"
    NVME_WRITTEN = "nvme_written"
    COPY_IN = "copy_in"
    COPY_OUT = "copy_out"
    GATHERED = "gathered"
    REDUCED = "reduced"


DRIVE = "drive"
"""Of busy seconds: those in which a drive read or wrote."""
_DRIVE_LINKS = {Lane.NVME_READ: Link.NVME_READ, Lane.NVME_WRITE: Link.NVME_WRITTEN}


class Work(StrEnum):
    """Work of ours on the thread that trains."""

    UPDATE_KERNEL = "update kernel"
    GRADIENT_ACCUMULATION = "gradient accumulation"
    GRADIENT_NORM = "gradient norm"
    CHECKSUM = "checksum"
    """Of what is written where steps are committed."""


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
    def working(self, work: Work, whose: str = "") -> Iterator[None]:  # noqa: ARG002 - for who keeps it
        """A block is `work`, but for what in it is waiting or other work; for `whose` sake, a name."""
        yield

    def span(self, lane: Lane, name: str, begin_seconds: float, end_seconds: float, *, nbytes: int = 0) -> None:
        """The calling thread kept `lane` busy; times are those of `time.perf_counter`."""

    def on_stream(self, lane: Lane, stream: Stream | None, name: str, nbytes: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """What a block enqueues on a stream (None: compute) keeps `lane` busy until the stream is through with it."""
        return _NOTHING

    def in_flight(self, lane: Lane, name: str, begin_seconds: float, ticket: Waitable, nbytes: int) -> Waitable:  # noqa: ARG002
        """A transfer was submitted: the ticket to wait for it by. It keeps `lane` busy until its bytes have moved."""
        return ticket

    def compute_pauses(self) -> None:
        """The model does not compute from now on."""

    def compute_begins(self, what: str, point: str) -> None:
        """It computes, from now on, a pass ("forward") of a hook point that it had not begun."""

    def compute_ends(self, point: str) -> None:
        """It is through with the last of the hook point's passes that it had begun, and goes on with the one around."""

    def step_ended(self, report: StepReport, end_seconds: float) -> None:
        """A step was done at this time."""


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
    busy : dict[str, float]
        Seconds in which transfers of a drive were under way: by link, and "drive" for both together.
    """

    bytes_moved: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    hidden_work: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)


class CountingRecorder(Recorder):
    """Adds up, from any thread.

    [Note: each second counts once]
    Work contains waits and other work: gradients are accumulated in a buffer that, once full, is sent home, where they
    are normed. Each is counted without those inside it, so that all of them and compute add up to the step.

    Attributes
    ----------
    follower : Recorder
        Is told of spans. Keeps nothing unless somebody wants a timeline.
    """

    def __init__(self) -> None:
        self.follower = Recorder()
        self._lock = threading.Lock()
        self._inner = _Inner()
        self._bytes: Counter[str] = Counter()
        self._waits: dict[str, float] = {}
        self._work: dict[str, float] = {}
        self._hidden: dict[str, float] = {}
        self._transfers: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in _DRIVE_LINKS}
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
    def working(self, work: Work, whose: str = "") -> Iterator[None]:
        """Time a block as `work`, without what in it counts already."""
        begin, outer = time.perf_counter(), self._inner.seconds
        self._inner.seconds = 0.0
        try:
            yield
        finally:
            end = time.perf_counter()
            self.worked(work, end - begin - self._inner.seconds)
            self._inner.seconds = outer + end - begin
            self.follower.span(Lane.CPU_UPDATE, f"{work.value} {whose}".rstrip(), begin, end)

    def take(self) -> Counts:
        """All since the last call."""
        with self._lock:
            bytes_moved = {link.value: self._bytes[link.value] for link in Link}
            transfers = self._transfers
            taken = Counts(bytes_moved, self._waits, self._work, self._hidden)
            self._bytes, self._waits, self._work, self._hidden = Counter(), {}, {}, {}
            self._transfers = {lane: [] for lane in _DRIVE_LINKS}
        taken.busy.update({link.value: covered_seconds(transfers[lane]) for lane, link in _DRIVE_LINKS.items()})
        taken.busy[DRIVE] = covered_seconds(chain.from_iterable(transfers.values()))
        return taken

    def span(self, lane: Lane, name: str, begin_seconds: float, end_seconds: float, *, nbytes: int = 0) -> None:
        """Pass it on."""
        self.follower.span(lane, name, begin_seconds, end_seconds, nbytes=nbytes)

    def on_stream(self, lane: Lane, stream: Stream | None, name: str, nbytes: int) -> AbstractContextManager[None]:
        """Pass it on."""
        return self.follower.on_stream(lane, stream, name, nbytes)

    def in_flight(self, lane: Lane, name: str, begin_seconds: float, ticket: Waitable, nbytes: int) -> Waitable:
        """Add the time that it takes, and pass it on."""
        timed = InFlight(ticket, lambda end_seconds: self._transferred(lane, begin_seconds, end_seconds))
        return self.follower.in_flight(lane, name, begin_seconds, timed, nbytes)

    def _transferred(self, lane: Lane, begin_seconds: float, end_seconds: float) -> None:
        with self._lock:
            self._transfers[lane].append((begin_seconds, end_seconds))

    def compute_pauses(self) -> None:
        """Pass it on."""
        self.follower.compute_pauses()

    def compute_begins(self, what: str, point: str) -> None:
        """Pass it on."""
        self.follower.compute_begins(what, point)

    def compute_ends(self, point: str) -> None:
        """Pass it on."""
        self.follower.compute_ends(point)

    def step_ended(self, report: StepReport, end_seconds: float) -> None:
        """Pass it on."""
        self.follower.step_ended(report, end_seconds)
