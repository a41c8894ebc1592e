"""Each rank writes a timeline of its own, with what it gathered and reduced."""

from __future__ import annotations

from pathlib import Path

from support.rank_trace import trace_a_step
from support.ranks import run_ranks
from support.trace_events import read_trace


def test_gathers_and_reductions_are_lanes_of_each_ranks_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    moved = run_ranks(trace_a_step, 2, str(folder), str(tmp_path / "out.json"))
    for rank, name in enumerate(["out.json", "out.rank1.json"]):
        trace = read_trace(tmp_path / name)
        assert (trace.pid, trace.process) == (rank, f"zerooffload rank {rank}")
        for lane, link in (("gather", "gathered"), ("reduce", "reduced")):
            assert sum(event["args"]["bytes"] for event in trace.lanes[lane]) == moved[rank][link] > 0
            assert "transformer.h.0/float32" in {event["name"] for event in trace.lanes[lane]}
