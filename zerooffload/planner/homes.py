"""Homes for a run of which nobody said what it computes: those that cost its links least. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from zerooffload.config import TierName, UpdateMode
from zerooffload.planner.admission import AnnouncedPlan, Limits
from zerooffload.planner.cost import StepKind, speeds_of
from zerooffload.planner.cost.demand import may_go_ahead
from zerooffload.planner.cost.step import floor_seconds
from zerooffload.planner.placement import is_auto
from zerooffload.planner.problem import PlacementProblem, choices_of
from zerooffload.planner.profiles import MachineProfile, ModelProfile, PassWork, UnitWork
from zerooffload.planner.search.candidates import Wish, best_first, candidates
from zerooffload.planner.search.shortfall import shortfall


def leaves_homes_open(problem: PlacementProblem) -> bool:
    """Whether a home of some trained state is for a plan to choose."""
    choices = choices_of(problem.config)
    return any(
        is_auto(choice, layout.name)
        for layout in problem.layouts
        for choice in (choices.params, choices.optimizer, choices.gradients)
    )


def homes_within(
    problem: PlacementProblem, limits: Limits, machine: MachineProfile, tiers: Sequence[TierName]
) -> AnnouncedPlan:
    """The run whose links are busy for the shortest time in a step; compute, which is not known, counts as nothing.

    Parameters
    ----------
    tiers : Sequence[TierName]
        Where states may be whose home is "auto", the nearest first.

    Raises
    ------
    BudgetError
        If none fits the limits: with what is needed, and the smallest changes that help.
    """
    speeds = speeds_of(machine)
    idle = _idle(problem)
    kind = StepKind(schedule=UpdateMode.UNDER_NEXT_FORWARD, accumulation=problem.config.accumulation_steps or 1)
    order = [layout.name for layout in problem.layouts]
    wish = Wish(problem=problem, limits=limits, speeds=speeds, kind=kind, order=order, tiers=tiers)

    def seconds(plan: AnnouncedPlan) -> float:
        ahead = may_go_ahead(plan.placement)
        schedule = UpdateMode.DURING_BACKWARD if ahead else UpdateMode.UNDER_NEXT_FORWARD
        return floor_seconds(plan, idle, speeds, StepKind(schedule=schedule, accumulation=kind.accumulation))

    plans = best_first(candidates(wish), seconds)
    if not plans:
        raise shortfall(wish)
    return plans[0]


def _idle(problem: PlacementProblem) -> ModelProfile:
    works = tuple(
        UnitWork(
            name=layout.name,
            forward=PassWork(),
            backward=PassWork(),
            input_nbytes=0,
            saved_nbytes=0,
            forward_peak_nbytes=0,
            backward_peak_nbytes=0,
        )
        for layout in problem.layouts
    )
    return ModelProfile(name="unknown", batch_size=1, sequence_length=1, units=works, peak_nbytes=0, saved_nbytes=0)
