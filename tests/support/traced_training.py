"""A training of which some steps are traced, and what their trace must show whatever the placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.reference_training import Outcome, Recipe, train_offloaded
from support.trace_events import Trace
from torch import nn

import zerooffload as zo
from zerooffload.runtime.build import Environment
from zerooffload.telemetry import Wait

LINK_OF_LANE = {
    "nvme read": "nvme_read",
    "nvme write": "nvme_written",
    "copy in": "copy_in",
    "copy out": "copy_out",
    "gather": "gathered",
    "reduce": "reduced",
}


def train_traced(recipe: Recipe, environment: Environment | None, path: Path, **config: Any) -> Outcome:
    """Train all steps of a recipe, all but the first of them under `zo.trace`."""
    traces: list[Any] = []

    def between(model: nn.Module, step: int) -> list[float]:
        if not step:
            traces.append(zo.trace(model, path))
            traces[-1].__enter__()
        elif step == recipe.num_steps - 1:
            traces[-1].__exit__(None, None, None)
        return []

    return train_offloaded(replace(recipe, between=between), environment, **config)


def check_steps(trace: Trace, report: zo.StepReport) -> None:
    """Slices lie in the steps, bytes are those of the reports, and each stall has a cause."""
    steps = trace.lanes.pop("step")
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    for name, slices in trace.lanes.items():
        for event in slices:
            assert begin <= event["ts"] <= end, (name, event)
    for step in steps:
        assert _bytes_by_link(trace, step) == {
            link: nbytes for link, nbytes in step["args"]["bytes_moved"].items() if nbytes
        }
    assert steps[-1]["args"]["bytes_moved"] == dict(report.bytes_moved)
    assert {event["name"] for event in trace.lanes["stall"]} <= {wait.value for wait in Wait}
    stalls = [event for event in trace.lanes["stall"] if event["ts"] >= steps[-1]["ts"]]
    assert {event["name"] for event in stalls} == set(report.waits)
    assert sum(event["dur"] for event in stalls) <= steps[-1]["dur"]


def _bytes_by_link(trace: Trace, step: Mapping[str, Any]) -> dict[str, int]:
    """Of transfers that began in a step."""

    def in_step(lane: str) -> Iterator[int]:
        for event in trace.lanes.get(lane, []):
            if step["ts"] <= event["ts"] < step["ts"] + step["dur"]:
                yield event["args"]["bytes"]

    found = {link: sum(in_step(lane)) for lane, link in LINK_OF_LANE.items()}
    return {link: nbytes for link, nbytes in found.items() if nbytes}
