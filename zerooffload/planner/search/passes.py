"""What a forward and a backward take of each resource wherever states are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerooffload.planner.cost import Speeds, StepKind
from zerooffload.planner.cost.demand import Demand, input_traffic
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.profiles import ModelProfile
from zerooffload.planner.search.kinds import RESOURCES, Vector, resource_seconds


@dataclass(frozen=True, eq=False)
class PassCosts:
    """Seconds of each of `RESOURCES`, [7], in each pass."""

    forward: Vector
    backward: Vector


IDLE = PassCosts(np.zeros(len(RESOURCES)), np.zeros(len(RESOURCES)))
"""Of a model of which nobody said what it computes."""


def compute_seconds(model: ModelProfile, kind: StepKind, speeds: Speeds) -> tuple[float, float]:
    """Of a forward and of a backward."""
    forward = sum(speeds.compute_seconds(work.forward) for work in model.units)
    again = sum(speeds.compute_seconds(work.forward) for work in model.units if work.name in kind.computed_again)
    backward = sum(speeds.compute_seconds(work.backward) for work in model.units) + again
    return forward * kind.num_slices, backward * kind.num_slices


def pass_costs(problem: PlacementProblem, model: ModelProfile, kind: StepKind, speeds: Speeds) -> PassCosts:
    """Compute, and the inputs of blocks on their way to their homes and back."""
    forward, backward = compute_seconds(model, kind, speeds)
    copied, on_drive = 0, 0
    for work in model.units:
        home = problem.block_inputs.homes.get(work.name)
        traffic = input_traffic(home, work.input_nbytes * kind.num_slices, problem.reach)
        copied, on_drive = copied + traffic.copied, on_drive + traffic.on_drive
    return PassCosts(
        forward=_with_compute(resource_seconds(Demand(copy_out=copied, nvme_written=on_drive), speeds), forward),
        backward=_with_compute(resource_seconds(Demand(copy_in=copied, nvme_read=on_drive), speeds), backward),
    )


def _with_compute(seconds: Vector, compute: float) -> Vector:
    seconds[RESOURCES.index("compute")] += compute
    return seconds
