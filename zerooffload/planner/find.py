"""Finding a plan: within the budgets of a machine, the one whose steps are predicted to be the shortest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from glob import escape
from typing import Any

from zerooffload.config import OffloadConfig, TierName
from zerooffload.errors import BudgetError, ConfigError
from zerooffload.planner.admission import AnnouncedPlan, Limits
from zerooffload.planner.cost import Schedule, StepKind, estimate
from zerooffload.planner.cost.memory import activation_bytes
from zerooffload.planner.cost.step import may_go_ahead
from zerooffload.planner.plan import Homes, Plan
from zerooffload.planner.problem import PlacementProblem, choices_of
from zerooffload.planner.profiles import MachineProfile, ModelProfile

DEFAULT_PART = 0.75
"""Of memory, for a run without a bound."""
_ACTIVATIONS_MARGIN = 1.1
"""Of predicted activations, what is left free for them."""
_UNBOUNDED = 1 << 62
"""Of drives whose space nobody told."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned.

    Attributes
    ----------
    config : OffloadConfig
        What the user has decided; "auto" is what the plan decides.
    machine : MachineProfile
    batch_size : int
        Samples of a forward of one rank.
    profile_of : callable
        What the model asks for on a forward of so many samples.
    problem_of : callable
        What is to be placed under settings.
    computed_again : frozenset[str]
        Units that the model itself computes again in backward.
    clips : bool
        Whether the gradients' norm is wanted.
    baseline_bytes : int, optional
        Host memory of the process before the run.
    """

    config: OffloadConfig
    machine: MachineProfile
    batch_size: int
    profile_of: Callable[[int], ModelProfile]
    problem_of: Callable[[OffloadConfig], PlacementProblem]
    computed_again: frozenset[str] = frozenset()
    clips: bool = True
    baseline_bytes: int | None = None


def find_plan(request: Request) -> Plan:
    """The plan.

    Raises
    ------
    BudgetError
        If no choice fits the budgets: with the tier, what is needed and had, the three largest holders, and the
        smallest change that helps.
    ConfigError
        If a setting or the machine's profile cannot work as given.
    """
    config = request.config
    if not config.nvme_paths and request.machine.drives:
        config = config.model_copy(update={"nvme_paths": tuple(drive.path for drive in request.machine.drives)})
    problem = request.problem_of(config)
    profile = request.profile_of(config.micro_batch_size or request.batch_size)
    kind = _kind(request, config, problem)
    limits = limits_on(request.machine, config, max(activation_bytes(profile, kind).values()))
    choices = choices_of(config)
    announced = problem.announced(choices, limits).with_cache()
    kind = replace(kind, schedule=_schedule(config, announced))
    homes = homes_of(announced)
    return Plan(
        machine=request.machine,
        model=profile,
        announced=announced,
        kind=kind,
        settings=settings_of(homes),
        homes=homes,
        estimate=estimate(announced, profile, request.machine, kind, baseline_bytes=request.baseline_bytes),
        reasons=(),
    )


def limits_on(machine: MachineProfile, config: OffloadConfig, activations_nbytes: int) -> Limits:
    """What a rank of the machine may lease, activations left free.

    Raises
    ------
    BudgetError
        If activations alone do not fit.
    """
    device, host = machine.device, machine.host
    left_free = int(_ACTIVATIONS_MARGIN * activations_nbytes)
    host_bytes = host.memory // device.count
    computes_in = host_bytes if device.shares_host_memory else device.memory
    if left_free > computes_in:
        raise BudgetError(
            f"activations alone need {left_free} bytes, and {machine.name} has {computes_in} bytes for them: take a"
            " smaller batch, micro_batch_size, or gradient checkpointing"
        )
    host_limit = int(DEFAULT_PART * host_bytes) if config.host_memory is None else config.host_memory
    if device.shares_host_memory:
        host_limit = min(host_limit, host_bytes - left_free)
    device_limit = device.memory - left_free if config.device_memory is None else config.device_memory
    if device.shares_host_memory:
        device_limit = host_limit if config.device_memory is None else config.device_memory
    spaces = [drive.space for drive in machine.drives]
    space = sum(space for space in spaces if space is not None) // device.count
    unbounded = any(space is None for space in spaces)
    nvme_limit = (_UNBOUNDED if unbounded else space) if config.nvme_space is None else config.nvme_space
    return Limits(min(device_limit, computes_in), min(host_limit, host_bytes), nvme_limit, device.shares_host_memory)


def homes_of(plan: AnnouncedPlan) -> dict[str, Homes]:
    """Each unit's homes."""
    found = {}
    for unit in plan.placement.units:
        trained = [flat for flat in unit.flats if flat.optimizer is not None and flat.gradient is not None]
        flat = next(iter([*trained, *unit.flats]), None)
        if flat is None:
            continue
        found[unit.name] = Homes(
            params=flat.param.tier,
            optimizer=flat.optimizer.tier if flat.optimizer else flat.param.tier,
            gradients=flat.gradient.tier if flat.gradient else flat.param.tier,
        )
    return found


def settings_of(homes: Mapping[str, Homes]) -> dict[str, Any]:
    """The fields of `OffloadConfig` that give a run these homes."""
    tiers = {
        state: {name: getattr(of_unit, state) for name, of_unit in homes.items()}
        for state in ("params", "optimizer", "gradients")
    }
    return {state: _shortest(of_units) for state, of_units in tiers.items()}


def _shortest(of_units: Mapping[str, TierName]) -> str | dict[str, str]:
    """One tier for all, or one for each unit, and one for what is left."""
    tiers = list(of_units.values())
    if len(set(tiers)) == 1:
        return tiers[0].value
    usual = max(set(tiers), key=tiers.count)
    others = {escape(name): tier.value for name, tier in of_units.items() if tier is not usual}
    return {**others, "*": usual.value}


def _kind(request: Request, config: OffloadConfig, problem: PlacementProblem) -> StepKind:
    size = config.micro_batch_size
    if size is not None and request.batch_size % size:
        raise ConfigError(f"a batch of {request.batch_size} is no multiple of micro_batch_size, {size}")
    return StepKind(
        schedule=Schedule.AFTER_BACKWARD,
        accumulation=config.accumulation_steps or 1,
        computed_again=request.computed_again | frozenset(problem.block_inputs.homes),
        num_slices=1 if size is None else request.batch_size // size,
        clips=request.clips,
    )


def _schedule(config: OffloadConfig, plan: AnnouncedPlan) -> Schedule:
    """As a run chooses it, where clipping does not fire."""
    if config.update != "auto":
        return Schedule(config.update)
    if not plan.placement.update_uses_other_resources:
        return Schedule.AFTER_BACKWARD
    return Schedule.DURING_BACKWARD if may_go_ahead(plan.placement) else Schedule.UNDER_NEXT_FORWARD
