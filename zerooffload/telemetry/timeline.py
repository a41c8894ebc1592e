"""Spans of a run as they come, handed on step by step.

[Note: when a span is known]
What a thread does is known when it has done it. What a stream does is known when somebody asks the marks around it
after the stream has passed them; nobody waits for that but `finish`. A transfer's end is taken by the engine when it
comes, and told to who waits for the transfer, which may be in a later step. So a batch holds what became known in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from zerooffload.accelerator import Accelerator, Mark, Stream
from zerooffload.telemetry.in_flight import InFlight
from zerooffload.telemetry.recorder import Recorder
from zerooffload.telemetry.report import StepReport
from zerooffload.telemetry.spans import Lane, Span, innermost
from zerooffload.telemetry.waits import Waitable

MOST_SPANS = 50_000
"""Of a batch. What a long evaluation does is handed on in between: no step need end for it."""

_OWN_THREADS = "zerooffload"
"""What the names of threads of ours begin with."""


@dataclass(frozen=True, slots=True)
class Level:
    """How many bytes something held from then on, by `time.perf_counter`."""

    seconds: float
    name: str
    nbytes: int


@dataclass(frozen=True)
class Step:
    """A step that ended: its report, and its time, which begins where the step before ended or the timeline began."""

    report: StepReport
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Batch:
    """What became known since the last one.

    Attributes
    ----------
    step : Step or None
        The step that ended with it; None for what came while none ended.
    """

    spans: Sequence[Span]
    levels: Sequence[Level]
    step: Step | None = None


class Listener(Protocol):
    """Is handed what a timeline holds."""

    def took(self, batch: Batch) -> bool:
        """Take a batch; return whether more is wanted. Never raises."""


@dataclass(slots=True)
class _OnStream:
    """Work of a stream between two marks."""

    lane: Lane
    name: str
    nbytes: int
    begin: Mark
    end: Mark


@dataclass
class _Computing:
    """The passes of hook points that are under way, outer before inner, and since when the innermost computes."""

    passes: list[tuple[str, str]] = field(default_factory=list)
    since: Mark | None = None


class Timeline(Recorder):
    """Follows a run from when it is made until `finish`, from any thread.

    Parameters
    ----------
    listeners : Sequence[Listener]
        Get everything, in batches; the timeline keeps nothing that it has handed on.
    gauges : Mapping[str, callable]
        Bytes held, by name: asked whenever compute comes to another hook point.
    when_done : callable
        Called once no listener wants more.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        listeners: Sequence[Listener],
        gauges: Mapping[str, Callable[[], int]],
        when_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._when_done = when_done
        self._accelerator = accelerator
        self._listeners = list(listeners)
        self._gauges = gauges
        self._lock = threading.Lock()
        self._handing_on = threading.Lock()
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._on_streams: list[_OnStream] = []
        self._computing = _Computing()
        self._held: dict[str, int] = {}
        # The first mark of all may wait for the device: not in the first step.
        accelerator.mark(accelerator.compute)
        self._step_began = time.perf_counter()
        self._read_gauges()

    def span(self, lane: Lane, name: str, begin_seconds: float, end_seconds: float, *, nbytes: int = 0) -> None:
        """See `Recorder`."""
        self.add(Span(lane, name, begin_seconds, end_seconds, nbytes, _calling_thread()))

    def add(self, span: Span) -> None:
        """Keep a span until the batch is handed on."""
        with self._lock:
            self._spans.append(span)
            is_full = len(self._spans) >= MOST_SPANS
        if is_full:
            self._hand_on()

    def on_stream(self, lane: Lane, stream: Stream | None, name: str, nbytes: int) -> AbstractContextManager[None]:
        """See `Recorder`."""
        return self._marked(lane, self._accelerator.compute if stream is None else stream, name, nbytes)

    @contextmanager
    def _marked(self, lane: Lane, stream: Stream, name: str, nbytes: int) -> Iterator[None]:
        begin = self._accelerator.mark(stream)
        yield
        self._add_work(_OnStream(lane, name, nbytes, begin, self._accelerator.mark(stream)))

    def in_flight(self, lane: Lane, name: str, begin_seconds: float, ticket: Waitable, nbytes: int) -> Waitable:
        """See `Recorder`."""
        return InFlight(ticket, lambda end_seconds: self.add(Span(lane, name, begin_seconds, end_seconds, nbytes)))

    def compute_pauses(self) -> None:
        """See `Recorder`."""
        computing = self._computing
        since, computing.since = computing.since, None
        if since is not None and computing.passes:
            now = self._accelerator.mark(self._accelerator.compute)
            self._add_work(_OnStream(Lane.COMPUTE, " ".join(computing.passes[-1]), 0, since, now))

    def compute_begins(self, what: str, point: str) -> None:
        """See `Recorder`."""
        self.compute_pauses()
        self._read_gauges()
        self._computing.passes.append((what, point))
        self._computing.since = self._accelerator.mark(self._accelerator.compute)

    def compute_ends(self, point: str) -> None:
        """See `Recorder`."""
        self.compute_pauses()
        passes = self._computing.passes
        for index in reversed(range(len(passes))):
            if passes[index][1] == point:
                del passes[index]
                break
        if passes:
            self._computing.since = self._accelerator.mark(self._accelerator.compute)

    def step_ended(self, report: StepReport, end_seconds: float) -> None:
        """Hand on what the step did, as far as it is known."""
        self.compute_pauses()
        self._computing = _Computing()
        self._read_gauges()
        began, self._step_began = self._step_began, end_seconds
        self._hand_on(Step(report, began, end_seconds))

    def finish(self) -> None:
        """Wait for what streams still do, and hand on the rest."""
        self.compute_pauses()
        with self._lock:
            works = list(self._on_streams)
        for work in works:
            work.end.wait()
        self._hand_on()
        with self._handing_on:
            self._listeners.clear()

    def _add_work(self, work: _OnStream) -> None:
        begin, end = work.begin.seconds(), work.end.seconds()
        if self._accelerator.shares_host_memory and begin is not None and end is not None:
            # The stream is the thread, and what the thread does inside is cut out.
            self.span(work.lane, work.name, begin, end, nbytes=work.nbytes)
        else:
            with self._lock:
                self._on_streams.append(work)

    def _read_gauges(self) -> None:
        now = time.perf_counter()
        held = {name: gauge() for name, gauge in self._gauges.items()}
        with self._lock:
            self._levels += [Level(now, name, held[name]) for name in held if held[name] != self._held.get(name)]
        self._held = held

    def _hand_on(self, step: Step | None = None) -> None:
        with self._handing_on:
            with self._lock:
                spans, self._spans = self._spans, []
                levels, self._levels = self._levels, []
                works, self._on_streams = self._on_streams, []
            for work in works:
                begin, end = work.begin.seconds(), work.end.seconds()
                if begin is not None and end is not None:
                    spans.append(Span(work.lane, work.name, begin, end, work.nbytes))
                else:
                    with self._lock:
                        self._on_streams.append(work)
            batch = Batch(_each_moment_once(spans), levels, step)
            had_listeners = bool(self._listeners)
            self._listeners = [listener for listener in self._listeners if listener.took(batch)]
            if had_listeners and not self._listeners:
                self._when_done()


def _each_moment_once(spans: Sequence[Span]) -> list[Span]:
    threads: dict[str, list[Span]] = {}
    batch: list[Span] = []
    for span in spans:
        if span.thread is None:
            batch.append(span)
        else:
            threads.setdefault(span.thread, []).append(span)
    for of_thread in threads.values():
        batch += innermost(of_thread)
    return batch


def _calling_thread() -> str:
    """A thread of ours by its name; any other is the one that trains (autograd has its own for a device)."""
    name = threading.current_thread().name
    return name if name.startswith(_OWN_THREADS) else ""
