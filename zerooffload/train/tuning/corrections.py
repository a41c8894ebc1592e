"""Factors on the times of a machine's resources, from what a traced step shows beside what was predicted. Pure.

[Note: what is measured alone]
A lane that shares what it runs on with another one that is busy meanwhile tells nothing of either. On a CPU the model
and the update share cores; copies share a link with those that go the other way. So a resource is told by a step in
which it worked alone most of the time, and only if it worked for long enough to be measured. The drive shares itself
with nobody: what it reads and writes at the same time, its profile tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerooffload.planner.cost import speeds_of
from zerooffload.planner.plan import Plan
from zerooffload.planner.search.passes import compute_seconds
from zerooffload.telemetry import Lane, Span, Work
from zerooffload.telemetry.spans import busy_seconds

_LEAST_ALONE = 0.9
"""Of the time that a resource works."""
_LEAST_SECONDS = 2e-3
_LEAST_PART = 0.01
"""Of a step."""
_MOST = 4.0
"""A factor beyond it, or below its inverse, is no correction: something else is wrong."""

_LANDING = (Work.GRADIENT_ACCUMULATION, Work.GRADIENT_NORM)


@dataclass(frozen=True)
class _Resource:
    """Which spans are a resource's work, and which hinder it where they overlap."""

    own: Sequence[Span]
    others: Sequence[Span] = ()

    @property
    def alone(self) -> float:
        """The part of its time in which no other works."""
        busy = busy_seconds(self.own)
        both = busy_seconds([*self.own, *self.others])
        shared = busy + busy_seconds(self.others) - both
        return 1 - shared / busy if busy else 0.0


def corrections_from(plan: Plan, steps: Sequence[Sequence[Span]]) -> dict[str, float]:
    """The machine's corrections after some steps of a plan: those that it had, and those that can be told from them.

    Parameters
    ----------
    steps : Sequence[Sequence[Span]]
        Of each step its spans.
    """
    had = plan.machine.corrections
    learned: dict[str, list[float]] = {}
    for spans in steps:
        for name, part in _parts(plan, spans).items():
            learned.setdefault(name, []).append(part)
    factors = {name: had.get(name, 1.0) * statistics.median(parts) for name, parts in learned.items()}
    return {**had, **{name: factor for name, factor in factors.items() if 1 / _MOST <= factor <= _MOST}}


def _parts(plan: Plan, spans: Sequence[Span]) -> dict[str, float]:
    """Of each resource that worked alone: what it took, as a part of what was predicted."""
    predicted = _predicted(plan)
    found = {}
    for name, resource in _resources(spans, shares_host=plan.machine.device.shares_host_memory).items():
        took, expected = busy_seconds(resource.own), predicted[name]
        is_long = min(took, expected) >= max(_LEAST_SECONDS, _LEAST_PART * plan.estimate.seconds)
        if is_long and resource.alone >= _LEAST_ALONE:
            found[name] = took / expected
    return found


def _predicted(plan: Plan) -> Mapping[str, float]:
    busy = plan.estimate.busy
    # Gradients that are added at home count in compute's lane, and in a run as work of their own.
    passes = sum(compute_seconds(plan.model, plan.kind, speeds_of(plan.machine))) * plan.kind.accumulation
    copies = max(busy["copy in"], busy["copy out"])
    return {**busy, "compute": passes, "copies": copies}


def _resources(spans: Sequence[Span], *, shares_host: bool) -> dict[str, _Resource]:
    def of(*lanes: Lane) -> list[Span]:
        return [span for span in spans if span.lane in lanes]

    computing, working = of(Lane.COMPUTE), of(Lane.CPU_UPDATE)
    updating = [span for span in working if span.name.startswith(Work.UPDATE_KERNEL)]
    landing = [span for span in working if span.name.startswith(_LANDING)]
    copies = [of(Lane.COPY_IN), of(Lane.COPY_OUT)]
    copies.sort(key=busy_seconds, reverse=True)
    by_cores = computing if shares_host else [*copies[0], *copies[1]]
    return {
        "compute": _Resource(computing, working if shares_host else ()),
        "update": _Resource(updating, [*by_cores, *landing]),
        "landing": _Resource(landing, [*by_cores, *updating]),
        "copies": _Resource(copies[0], copies[1]),
        "drive": _Resource(of(Lane.NVME_READ, Lane.NVME_WRITE)),
        "link": _Resource(of(Lane.GATHER, Lane.REDUCE)),
    }
