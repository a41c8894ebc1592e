"""Units of a kind, and what each costs in each home. Pure.

[Note: what a search counts]
Most units of a model are alike, so homes are tried for one of each *kind*: what its states hold on each tier, and how
long they keep each resource busy in a step. All is linear in the number of units of a kind in a home, but for the
window: of parameters that move, the part that it holds need not come again in the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from zerooffload.config import OffloadConfig, TierName
from zerooffload.planner.cost import Speeds, StepKind
from zerooffload.planner.cost.demand import Demand, UnitDemand, unit_demands
from zerooffload.planner.placement import (
    Placement,
    UnitLayout,
    home_tier,
    is_auto,
    with_second_places,
)
from zerooffload.planner.plan import Homes, choices_from
from zerooffload.planner.problem import PlacementProblem, choices_of

Vector = NDArray[np.float64]

TIERS = tuple(TierName)
"""The order of bytes in a vector."""
RESOURCES = ("read", "write", "copy in", "copy out", "link", "cpu", "compute")
"""The order of seconds in a vector."""


@dataclass(frozen=True, eq=False)
class HomeCost:
    """A unit of a kind with its states in some homes.

    Attributes
    ----------
    homes : Homes
    nbytes : ndarray, [3]
        Leased on each of `TIERS`.
    moving_nbytes : float
        In the window of parameters in use.
    first, again, backward, update : ndarray, [7]
        Seconds of each of `RESOURCES`: for parameters in the first pass after an update and in each other one, for
        the gradients of all backwards, and for the update.
    """

    homes: Homes
    nbytes: Vector
    moving_nbytes: float
    first: Vector
    again: Vector
    backward: Vector
    update: Vector


@dataclass(frozen=True, eq=False)
class Kind:
    """Units that are alike.

    Attributes
    ----------
    units : tuple[str, ...]
        Their names, in the order of their forwards.
    costs : tuple[HomeCost, ...]
        One for each combination of homes that is allowed.
    """

    units: tuple[str, ...]
    costs: tuple[HomeCost, ...]


def kinds_of(
    problem: PlacementProblem,
    kind: StepKind,
    speeds: Speeds,
    order: Sequence[str],
    *,
    tiers: Sequence[TierName],
    doubled: bool,
) -> list[Kind]:
    """The kinds of a problem's units.

    Parameters
    ----------
    order : Sequence[str]
        Names of the units in the order of their forwards.
    tiers : Sequence[TierName]
        Where "auto" may put a state.
    doubled : bool
        Count second places.
    """
    layouts = {layout.name: layout for layout in problem.layouts}
    alike: dict[tuple[object, tuple[Homes, ...]], list[str]] = {}
    for name in [*order, *(name for name in layouts if name not in order)]:
        if layouts[name].flats:
            signature = tuple(flat.signature for flat in layouts[name].flats)
            alike.setdefault((signature, _allowed(problem.config, name, tiers)), []).append(name)
    found = []
    for (_, allowed), names in alike.items():
        costs = [_cost(problem, layouts[names[0]], homes, kind, speeds, doubled=doubled) for homes in allowed]
        found.append(Kind(tuple(names), tuple(costs)))
    return found


def _allowed(config: OffloadConfig, name: str, tiers: Sequence[TierName]) -> tuple[Homes, ...]:
    choices = choices_of(config)
    options = [
        list(tiers) if is_auto(choice, name) else [home_tier(choice, name)]
        for choice in (choices.params, choices.optimizer, choices.gradients)
    ]
    return tuple(Homes(params=params, optimizer=opt, gradients=grads) for params, opt, grads in product(*options))


def _cost(
    problem: PlacementProblem, layout: UnitLayout, homes: Homes, kind: StepKind, speeds: Speeds, *, doubled: bool
) -> HomeCost:
    """A unit that is placed alone."""
    alone = replace(
        problem,
        layouts=[replace(layout, needs=(layout.name,))],
        # Whether steps are committed depends on the others.
        config=problem.config.model_copy(update={"atomic_steps": problem.config.durable}),
    )
    placement = alone.placed(choices_from({layout.name: homes}))
    if doubled:
        placement = with_second_places(placement)
    unit = unit_demands(placement)[layout.name]
    leaving = [unit.first_leaving, *[unit.leaving] * (kind.accumulation - 1)]
    return HomeCost(
        homes=homes,
        nbytes=_nbytes(placement),
        moving_nbytes=unit.range_nbytes,
        first=resource_seconds(unit.first_arrival, speeds),
        again=resource_seconds(unit.arrival, speeds),
        backward=sum((resource_seconds(demand, speeds) for demand in leaving), np.zeros(len(RESOURCES))),
        update=_update_seconds(unit, speeds),
    )


def _nbytes(placement: Placement) -> Vector:
    claims = placement.home_claims()
    return np.array([float(sum(claim.nbytes for claim in claims if claim.tier is tier)) for tier in TIERS])


def resource_seconds(demand: Demand, speeds: Speeds) -> Vector:
    """Of each of `RESOURCES`, [7], for what moves; compute is none of it."""
    return np.array(
        [
            _divided(demand.nvme_read, speeds.read),
            _divided(demand.nvme_written, speeds.write),
            demand.copy_in / speeds.copy_in,
            demand.copy_out / speeds.copy_out,
            (demand.gathered + demand.reduced) / speeds.gather,
            demand.host_traffic / speeds.kernel,
            0.0,
        ]
    )


def _divided(nbytes: float, rate: float) -> float:
    return nbytes / rate if nbytes else 0.0


def _update_seconds(unit: UnitDemand, speeds: Speeds) -> Vector:
    seconds = resource_seconds(unit.update, speeds)
    seconds[RESOURCES.index("cpu")] += unit.checked_nbytes / speeds.checksum
    seconds[RESOURCES.index("compute")] += unit.device_traffic / speeds.machine.device.memory_bandwidth
    return seconds
