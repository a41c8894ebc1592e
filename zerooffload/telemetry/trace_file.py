"""A timeline as a file that ui.perfetto.dev and chrome://tracing open: Chrome's trace events, a JSON array.

[Note: a file that is whole at any time]
Each batch takes the place of the closing bracket and brings a new one, in one write. So the file can be looked at while
the run goes on, and a run that is killed leaves one that loads.

A lane is a thread of the rank's process, with a further one beside it where spans overlap. Times are microseconds of
`time.perf_counter`, which all ranks of a machine share.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zerooffload.errors import ConfigError
from zerooffload.telemetry.spans import Lane, Rows, Span
from zerooffload.telemetry.timeline import Batch, Level, Step

_log = logging.getLogger("zerooffload")

_STEP_TRACK = "step"
_ORDER = {name: order for order, name in enumerate([_STEP_TRACK, *Lane])}
_CLOSING = b"\n]\n"
_TRACKS_OF_A_RANK = 1000


def path_of_rank(path: Path, rank: int) -> Path:
    """Each rank has a file of its own: `out.json`, `out.rank1.json`, ..."""
    return path if not rank else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class TraceFile:
    """Writes what a timeline hands on; see `Listener`.

    Parameters
    ----------
    path : pathlib.Path
        Overwritten. Rank 0's file: the others' are beside it.
    steps : int, optional
        Write the first so many steps. Default: all.

    Raises
    ------
    ConfigError
        If the file cannot be made.
    """

    def __init__(self, path: Path, *, rank: int = 0, steps: int | None = None) -> None:
        self.path = path_of_rank(path, rank)
        self._rank = rank
        self._steps_left = steps
        self._tracks: dict[tuple[str, str], Rows] = {}
        self._held: dict[str, int] = {}
        self._tids: dict[tuple[tuple[str, str], int], int] = {}
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write the trace {self.path}: {error.strerror}") from error
        self._write_at = 0
        self._append([self._event("M", "process_name", args={"name": f"zerooffload rank {rank}"})])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def took(self, batch: Batch) -> bool:
        """Write it; a file that cannot be written is told of once, and training goes on."""
        if self._file.closed:
            return False
        events = [*self._span_events(batch.spans), *(self._level_event(level) for level in batch.levels)]
        self._held.update({level.name: level.nbytes for level in batch.levels})
        if batch.step is not None:
            events += self._step_events(batch.step)
        try:
            self._append(events)
        except OSError as error:
            _log.warning("the trace %s ends here: %s", self.path, error.strerror)
            self.close()
            return False
        if batch.step is not None and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.close()
        return not self._file.closed

    def close(self) -> None:
        """No more is written; again is harmless."""
        self._file.close()

    def _append(self, events: Iterable[str]) -> None:
        text = ",\n".join(events)
        if not text:
            return
        written = (",\n" if self._write_at else "[\n").encode() + text.encode()
        left = memoryview(written + _CLOSING)
        offset = self._write_at
        while left:
            count = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[count:], offset + count
        self._write_at += len(written)

    def _span_events(self, spans: Iterable[Span]) -> Iterator[str]:
        tracks: dict[tuple[str, str], list[Span]] = {}
        for span in spans:
            tracks.setdefault((span.lane.value, span.thread or ""), []).append(span)
        for track, of_track in tracks.items():
            rows = self._tracks.setdefault(track, Rows())
            for row, span in rows.place(of_track):
                args = {"bytes": span.nbytes} if span.nbytes else None
                yield from self._slice(track, row, span, args)

    def _step_events(self, step: Step) -> Iterator[str]:
        report = step.report
        span = Span(Lane.COMPUTE, f"step {report.step}", step.begin_seconds, step.end_seconds)
        args = {"seconds": report.seconds, "bytes_moved": dict(report.bytes_moved), "waits": dict(report.waits)}
        yield from self._slice((_STEP_TRACK, ""), 0, span, args)
        # A viewer draws a level as far as the next one is told.
        yield from (self._level_event(Level(step.end_seconds, name, nbytes)) for name, nbytes in self._held.items())

    def _slice(self, track: tuple[str, str], row: int, span: Span, args: dict[str, Any] | None) -> Iterator[str]:
        tid = self._tids.get((track, row))
        if tid is None:
            # No two ranks have one in common: Perfetto takes threads for those of a whole machine.
            tid = self._tids[track, row] = _TRACKS_OF_A_RANK * self._rank + len(self._tids) + 1
            lane, thread = track
            name = lane + (f" of {thread}" if thread else "") + (f" ({row + 1})" if row else "")
            # Lanes in their order; in a lane, what other threads do behind what the one that trains does.
            place = 1000 * _ORDER[lane] + 500 * bool(thread) + row
            yield self._event("M", "thread_name", tid=tid, args={"name": name})
            yield self._event("M", "thread_sort_index", tid=tid, args={"sort_index": place})
        begin, end = _microseconds(span.begin_seconds), _microseconds(span.end_seconds)
        yield self._event("X", span.name, tid=tid, ts=begin, dur=end - begin, args=args, cat=track[0])

    def _level_event(self, level: Level) -> str:
        ts = _microseconds(level.seconds)
        return self._event("C", f"memory: {level.name}", ts=ts, args={"bytes": level.nbytes})

    def _event(
        self, phase: str, name: str, *, args: dict[str, Any] | None = None, cat: str = "", tid: int = 0, **more: float
    ) -> str:
        event: dict[str, Any] = {"ph": phase, "name": name, "pid": self._rank, "tid": tid, **more}
        if cat:
            event["cat"] = cat
        if args is not None:
            event["args"] = args
        return json.dumps(event, separators=(",", ":"))


def _microseconds(seconds: float) -> float:
    """To an eighth: exact as a float and in whole nanoseconds, so that spans that touch never come to overlap."""
    return round(seconds * 8e6) / 8
