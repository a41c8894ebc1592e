"""Chrome's trace events as viewers read them: what makes a file one that they show whole."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, Any]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "pid": int, "tid": int, "ts": _NUMBER, "dur": _NUMBER, "cat": str},
    "C": {"name": str, "pid": int, "ts": _NUMBER, "args": dict},
}


@dataclass
class Trace:
    """A file that was read.

    Attributes
    ----------
    lanes : dict[str, list[dict]]
        Slices by lane (rows of one lane together), in the order of their beginnings.
    counters : dict[str, list[tuple[float, float]]]
        Times in microseconds and values.
    process : str
    """

    lanes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    process: str = ""
    pid: int = 0


def read_trace(path: Path) -> Trace:
    """Read a file and see that it is what viewers want.

    Each event has the fields of its phase; each track has a name; slices of one track do not overlap, for a viewer
    drops those that overlap without one containing the other.
    """
    events = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(events, list)
    trace = Trace()
    names: dict[int, str] = {}
    tracks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        _check_fields(event)
        if event["name"] == "process_name":
            trace.process, trace.pid = event["args"]["name"], event["pid"]
        elif event["name"] == "thread_name":
            assert event["tid"] not in names
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            tracks[event["tid"]].append(event)
        elif event["ph"] == "C":
            (value,) = event["args"].values()
            trace.counters.setdefault(event["name"], []).append((event["ts"], value))
    assert {event["pid"] for event in events} == {trace.pid}
    assert tracks.keys() <= names.keys()
    for tid, slices in tracks.items():
        slices.sort(key=lambda event: event["ts"])
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"], (names[tid], one, other)
        trace.lanes.setdefault(names[tid].partition(" (")[0], []).extend(slices)
    for slices in trace.lanes.values():
        slices.sort(key=lambda event: event["ts"])
    return trace


def _check_fields(event: dict[str, Any]) -> None:
    fields = _FIELDS[event["ph"]]
    for name, kind in fields.items():
        assert isinstance(event[name], kind), event
    assert event.get("dur", 0) >= 0
    assert event["name"]
