from __future__ import annotations

import errno
import itertools
import json
import logging
import os
from typing import TYPE_CHECKING

import pytest
from support.trace_events import read_trace

from zerooffload import ConfigError
from zerooffload.telemetry import Batch, Lane, Level, Span, Step, StepReport, TraceFile
from zerooffload.telemetry.trace_file import path_of_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def span(begin: float, end: float, lane: Lane = Lane.NVME_READ, name: str = "x", thread: str | None = None) -> Span:
    return Span(lane, name, begin, end, 4096 if lane is Lane.NVME_READ else 0, thread)


def test_a_lane_is_a_named_track_and_overlapping_transfers_have_rows(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "out.json") as file:
        assert file.took(Batch([span(1, 3, name="a"), span(2, 4, name="b"), span(3, 5, name="c")], []))
        assert file.took(Batch([span(2.5, 6, name="late"), span(6, 7, Lane.STALL, "state read", "")], []))
    trace = read_trace(tmp_path / "out.json")
    assert [(event["name"], event["ts"], event["dur"]) for event in trace.lanes["nvme read"]] == [
        ("a", 1e6, 2e6),
        ("b", 2e6, 2e6),
        ("late", 2.5e6, 3.5e6),
        ("c", 3e6, 2e6),
    ]
    assert len({event["tid"] for event in trace.lanes["nvme read"]}) == 3
    assert trace.lanes["nvme read"][0]["args"] == {"bytes": 4096}
    assert [event["name"] for event in trace.lanes["stall"]] == ["state read"]


def test_other_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "out.json") as file:
        file.took(Batch([span(1, 3, Lane.STALL, thread=""), span(2, 4, Lane.STALL, thread="zerooffload-update")], []))
    assert set(read_trace(tmp_path / "out.json").lanes) == {"stall", "stall of zerooffload-update"}


def test_steps_and_levels_are_shown(tmp_path: Path, make_report: Callable[..., StepReport]) -> None:
    with TraceFile(tmp_path / "out.json", rank=2) as file:
        file.took(Batch([], [Level(1.5, "host", 77)], Step(make_report(3, nvme_read=8), 1.0, 2.0)))
    trace = read_trace(tmp_path / "out.rank2.json")
    (step,) = trace.lanes["step"]
    assert (step["name"], step["ts"], step["dur"], step["pid"]) == ("step 3", 1e6, 1e6, 2)
    assert step["args"]["bytes_moved"] == {"nvme_read": 8}
    assert step["args"]["waits"] == {"state read": 0.25}
    assert trace.counters == {"memory: host": [(1.5e6, 77), (2e6, 77)]}
    assert trace.process == "zerooffload rank 2"
    # Unlike any of another rank: files of several are joined.
    assert step["tid"] == 2001


def test_the_file_is_whole_at_any_time(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "out.json")
    for number in range(3):
        assert sum(map(len, read_trace(tmp_path / "out.json").lanes.values())) == number
        file.took(Batch([span(number, number + 1)], []))
    file.took(Batch([], []))
    assert len(read_trace(tmp_path / "out.json").lanes["nvme read"]) == 3
    file.close()


def test_what_touches_in_seconds_touches_in_the_file(tmp_path: Path) -> None:
    edges = [12009.4178632461 + 1e-7 * number**1.5 for number in range(400)]
    spans = [span(begin, end, Lane.COMPUTE, thread="") for begin, end in itertools.pairwise(edges)]
    with TraceFile(tmp_path / "out.json") as file:
        file.took(Batch(spans, []))
    slices = read_trace(tmp_path / "out.json").lanes["compute"]
    assert len({event["tid"] for event in slices}) == 1
    # In whole nanoseconds, and exactly so.
    assert all((1000 * event[field]).is_integer() for event in slices for field in ("ts", "dur"))


def test_names_may_hold_anything(tmp_path: Path) -> None:
    names = ['a "quoted" \\ name', "größer </script>", "\u2028\n"]
    with TraceFile(tmp_path / "out.json") as file:
        file.took(Batch([span(i, i + 1, name=name) for i, name in enumerate(names)], []))
    assert [event["name"] for event in read_trace(tmp_path / "out.json").lanes["nvme read"]] == names


def test_the_first_steps_are_written_and_no_more(tmp_path: Path, make_report: Callable[..., StepReport]) -> None:
    file = TraceFile(tmp_path / "out.json", steps=2)
    wanted = [
        file.took(Batch([span(step, step + 1)], [], Step(make_report(step), step, step + 1.0))) for step in range(4)
    ]
    assert wanted == [True, False, False, False]
    assert len(read_trace(tmp_path / "out.json").lanes["step"]) == 2


def test_an_earlier_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("x" * 10_000)
    TraceFile(tmp_path / "out.json").close()
    assert [event["name"] for event in json.loads((tmp_path / "out.json").read_text())] == ["process_name"]


def test_a_file_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the trace .*out.json: No such file or directory"):
        TraceFile(tmp_path / "missing" / "out.json")


def test_a_full_disk_ends_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(tmp_path / "out.json")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        assert [file.took(Batch([span(0, 1)], [])) for _ in range(2)] == [False, False]
    assert caplog.messages == [f"the trace {tmp_path / 'out.json'} ends here: No space left on device"]


def test_each_rank_has_a_file(tmp_path: Path) -> None:
    names = [path_of_rank(tmp_path / name, rank).name for name in ("out.json", "out") for rank in (0, 1)]
    assert names == ["out.json", "out.rank1.json", "out", "out.rank1"]
