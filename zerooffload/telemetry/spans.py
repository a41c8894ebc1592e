"""What took place when: spans of time in lanes, and arithmetic on them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Lane(StrEnum):
    """What a span keeps busy."""

    COMPUTE = "compute"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    CPU_UPDATE = "CPU update"
    GATHER = "gather"
    REDUCE = "reduce"
    STALL = "stall"
    """The training thread, or a thread of ours, stands still for the cause that the span is named by."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took place in a lane.

    Attributes
    ----------
    begin_seconds, end_seconds : float
        On the clock of `time.perf_counter`.
    nbytes : int
        That moved; 0 where none did.
    thread : str or None
        Which thread did it, "" for the one that trains; None for what no thread stood behind: a drive, a device.
    """

    lane: Lane
    name: str
    begin_seconds: float
    end_seconds: float
    nbytes: int = 0
    thread: str | None = None


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cut spans of one thread so that each moment is that of the innermost span alone.

    Work contains waits, and the model's backward contains work of ours: what is left of a span is what it did itself.
    Its bytes stay with its first piece.
    """
    pieces: list[Span] = []
    # Spans that have begun, outer before inner, and up to where each is in pieces.
    around: list[tuple[Span, float]] = []

    def cut(until_seconds: float) -> None:
        span, from_seconds = around[-1]
        until_seconds = min(until_seconds, span.end_seconds)
        if until_seconds > from_seconds:
            is_first = from_seconds == span.begin_seconds
            nbytes = span.nbytes if is_first else 0
            pieces.append(replace(span, begin_seconds=from_seconds, end_seconds=until_seconds, nbytes=nbytes))

    def leave() -> None:
        span, _ = around[-1]
        cut(span.end_seconds)
        around.pop()
        if around:
            outer, from_seconds = around[-1]
            around[-1] = outer, max(from_seconds, span.end_seconds)

    for span in sorted(spans, key=lambda span: (span.begin_seconds, -span.end_seconds)):
        while around and around[-1][0].end_seconds <= span.begin_seconds:
            leave()
        if around:
            cut(span.begin_seconds)
        around.append((span, span.begin_seconds))
    while around:
        leave()
    return pieces


def within(spans: Iterable[Span], begin_seconds: float, end_seconds: float) -> Iterator[Span]:
    """The parts of spans that lie between two times."""
    for span in spans:
        begin, end = max(span.begin_seconds, begin_seconds), min(span.end_seconds, end_seconds)
        if begin < end:
            whole = (begin, end) == (span.begin_seconds, span.end_seconds)
            yield span if whole else replace(span, begin_seconds=begin, end_seconds=end)


def busy_seconds(spans: Iterable[Span]) -> float:
    """The time in which at least one of the spans took place."""
    return covered_seconds((span.begin_seconds, span.end_seconds) for span in spans)


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that lies in at least one of these, from beginning to end."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class Rows:
    """Gives overlapping spans of a lane rows of their own, as few as the order of their coming allows."""

    def __init__(self) -> None:
        self._free_from: list[float] = []

    def place(self, spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
        """Each span with its row, counted from 0, in the order of their beginnings."""
        for span in sorted(spans, key=lambda span: (span.begin_seconds, span.end_seconds)):
            row = next((row for row, free in enumerate(self._free_from) if free <= span.begin_seconds), None)
            if row is None:
                row = len(self._free_from)
                self._free_from.append(0.0)
            self._free_from[row] = span.end_seconds
            yield row, span


def by_lane(spans: Iterable[Span]) -> dict[Lane, Sequence[Span]]:
    """The spans of each lane that has some, in the order of `Lane`."""
    found: dict[Lane, list[Span]] = {}
    for span in spans:
        found.setdefault(span.lane, []).append(span)
    return {lane: found[lane] for lane in Lane if lane in found}
