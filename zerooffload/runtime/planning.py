"""From a model and settings to the plan that a run announces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerooffload.calibration import remembered_machine
from zerooffload.config import OffloadConfig, TierName
from zerooffload.planner.admission import AnnouncedPlan, Limits
from zerooffload.planner.homes import homes_within, leaves_homes_open
from zerooffload.planner.placement import Reach, UnitLayout
from zerooffload.planner.problem import PlacementProblem, block_inputs_of, choices_of
from zerooffload.planner.profiles import MachineProfile, typical_machine
from zerooffload.planner.stages import Sharding
from zerooffload.runtime.checkpoint_room import checkpoint_nbytes
from zerooffload.runtime.micro_batches import check_blocks
from zerooffload.sharding.collectives import Collectives, agree
from zerooffload.sharding.grouping import UnitModules


def problem_of(
    units: Sequence[UnitModules],
    layouts: Sequence[UnitLayout],
    config: OffloadConfig,
    reach: Reach,
    *,
    sharding: Sharding,
) -> PlacementProblem:
    """What is to be placed of a model that was cut into units, and laid out.

    Raises
    ------
    ConfigError
        If the model or a setting cannot work as given.
    """
    inputs = block_inputs_of(units, layouts, config, reach)
    check_blocks(units, config, inputs)
    return PlacementProblem(
        layouts=layouts,
        config=config,
        reach=reach,
        sharding=sharding,
        block_inputs=inputs,
        checkpoint_nbytes=checkpoint_nbytes,
    )


def plan_together(problem: PlacementProblem, limits: Limits, collectives: Collectives) -> AnnouncedPlan:
    """The plan of this rank: with the homes and windows of all others.

    What "auto" leaves open is host, if that fits; else what `homes_within` finds. All ranks must find the same: they
    look for it with what the one has that has least.

    Raises
    ------
    BudgetError
        If the run does not fit, on this rank or another one.
    """
    least, sharers = problem, problem.sharding.num_sharers
    if leaves_homes_open(problem):
        everyones = collectives.gather_objects((limits, sharers))
        limits = _least([limits for limits, _ in everyones])
        fewest = min(sharers for _, sharers in everyones)
        if fewest < sharers:
            least = replace(problem, sharding=replace(problem.sharding, num_sharers=fewest))
    plan = agree(collectives, lambda: _plan(least, limits, collectives), "planning")
    return _same_windows(plan if least is problem else plan.with_sharers(sharers), collectives)


def _plan(problem: PlacementProblem, limits: Limits, collectives: Collectives) -> AnnouncedPlan:
    if leaves_homes_open(problem) and (problem.config.nvme_paths or problem.config.device_memory):
        on_host = problem.fitted(choices_of(problem.config), limits)
        if not isinstance(on_host, AnnouncedPlan):
            return homes_within(problem, limits, _machine(problem, collectives), _tiers(problem))
    return problem.announced(choices_of(problem.config), limits)


def _tiers(problem: PlacementProblem) -> list[TierName]:
    """Where the user has given room: device memory that nobody bounds is activations', too."""
    config = problem.config
    has_device = config.device_memory is not None and not problem.reach.device_shares_host
    return [
        *([TierName.DEVICE] if has_device else []),
        TierName.HOST,
        *([TierName.NVME] if config.nvme_paths else []),
    ]


def _machine(problem: PlacementProblem, collectives: Collectives) -> MachineProfile:
    """What is known of the machine, as far as all ranks know the same."""
    remembered = remembered_machine() if collectives.world_size == 1 else None
    if remembered is not None and not remembered.foreign and remembered.profile.drives:
        return remembered.profile
    return typical_machine(shares_host_memory=problem.reach.device_shares_host)


def _least(everyones: list[Limits]) -> Limits:
    """What every rank has: all must find the same homes."""
    return replace(
        everyones[0],
        device_bytes=min(limits.device_bytes for limits in everyones),
        host_bytes=min(limits.host_bytes for limits in everyones),
        nvme_bytes=min(limits.nvme_bytes for limits in everyones),
    )


def _same_windows(plan: AnnouncedPlan, collectives: Collectives) -> AnnouncedPlan:
    """The smallest windows of any rank: they decide when units are gathered, which must be the same everywhere."""
    windows = collectives.gather_objects((plan.window_nbytes, plan.collection_nbytes))
    return plan.with_windows(min(window for window, _ in windows), min(collection for _, collection in windows))
