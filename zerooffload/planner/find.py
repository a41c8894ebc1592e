"""Finding a plan: within the budgets of a machine, the one whose steps are predicted to be the shortest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from zerooffload.config import ActivationChoice, MomentFormat, OffloadConfig, TierName, UpdateMode
from zerooffload.errors import BudgetError, ConfigError
from zerooffload.planner.admission import DEFAULT_PART, UNBOUNDED_NBYTES, AnnouncedPlan, Limits
from zerooffload.planner.block_inputs import inputs_nbytes
from zerooffload.planner.cost import StepKind, estimate, speeds_of
from zerooffload.planner.cost.demand import may_go_ahead
from zerooffload.planner.cost.memory import activation_bytes
from zerooffload.planner.cost.step import floor_seconds, soon_seconds
from zerooffload.planner.plan import STATES, Homes, Plan
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.profiles import MachineProfile, ModelProfile
from zerooffload.planner.search.candidates import KindsFound, Wish, best_first, candidates, counted_seconds
from zerooffload.planner.search.homes import WORTH
from zerooffload.planner.search.passes import pass_costs
from zerooffload.planner.search.reasons import reasons_of
from zerooffload.planner.search.shortfall import shortfall

_ACTIVATIONS_MARGIN = 1.1
"""Of predicted activations, what is left free for them."""
_MOST_RUN_ON_PAPER = 4
_AS_GOOD = 1.05
"""What is counted, or guessed, to be slower by less may yet be the quickest."""
_MANY_UNITS, _MOST_WAYS = 100, 2
"""Of more units, how many ways to keep activations, and formats of moments, a search has time for."""


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
    may_use_moments : Sequence[MomentFormat]
        Formats that the plan may choose; they change the numbers.
    """

    config: OffloadConfig
    machine: MachineProfile
    batch_size: int
    profile_of: Callable[[int], ModelProfile]
    problem_of: Callable[[OffloadConfig], PlacementProblem]
    computed_again: frozenset[str] = frozenset()
    clips: bool = True
    baseline_bytes: int | None = None
    may_use_moments: Sequence[MomentFormat] = ()


@dataclass(frozen=True, eq=False)
class _Variant:
    """Settings that are fixed but for homes, and what the model asks for under them."""

    wish: Wish
    model: ModelProfile

    @cached_property
    def counted_seconds(self) -> float:
        """What a step takes in homes that need not fit."""
        return counted_seconds(self.wish)

    def kind_of(self, plan: AnnouncedPlan) -> StepKind:
        """What kind of steps a plan's are."""
        return replace(self.wish.kind, schedule=_schedule(self.wish.problem.config, plan))

    def least_seconds(self, plan: AnnouncedPlan) -> float:
        """What a step of a plan takes at least."""
        return floor_seconds(plan, self.model, self.wish.speeds, self.kind_of(plan))

    def seconds(self, plan: AnnouncedPlan) -> float:
        """What a step of a plan takes, nearly."""
        return soon_seconds(plan, self.model, self.wish.speeds, self.kind_of(plan))


@dataclass(frozen=True)
class _Found:
    """Homes that fit, and what a step takes then."""

    variant: _Variant
    announced: AnnouncedPlan
    least_seconds: float
    seconds: float

    @property
    def over_floor(self) -> float:
        """How many times its floor a step takes."""
        return self.seconds / self.least_seconds if self.least_seconds else 1.0


@contextmanager
def _without_collections() -> Iterator[None]:
    """Placements and steps on paper are small objects, none in a cycle: a collector would look for one in vain."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collections()
def find_plan(request: Request) -> Plan:
    """The plan.

    Raises
    ------
    BudgetError
        If no choice fits the budgets: with the tier, what is needed and had, the holders, and the smallest change that
        helps.
    ConfigError
        If a setting or the machine's profile cannot work as given.
    """
    outcomes = list(_variants(request))
    variants = [outcome for outcome in outcomes if isinstance(outcome, _Variant)]
    best = _best_of(variants) if variants else None
    if best is None:
        first = outcomes[0]
        raise shortfall(first.wish) if isinstance(first, _Variant) else first
    return _plan_of(request, best)


def _best_of(variants: Sequence[_Variant]) -> _Found | None:
    best: _Found | None = None
    has_many_units = len(variants[0].wish.problem.layouts) > _MANY_UNITS
    num_left = _MOST_WAYS if has_many_units else len(variants)
    for alike in _first_and_promising(variants):
        if num_left and (best is None or alike[0].counted_seconds < best.seconds):
            fitting = _first_that_fits(alike)
            if fitting is not None:
                num_left -= 1
                best = _quickest(*fitting, best) or best
    return best


def _first_and_promising(variants: Sequence[_Variant]) -> list[list[_Variant]]:
    """Variants that differ in slices alone together: those of the first, then the others, first what looks best."""
    groups: dict[str, list[_Variant]] = {}
    for variant in variants:
        config = variant.wish.problem.config
        groups.setdefault(f"{config.activations} {config.moments}", []).append(variant)
    first, *others = [_best_slices_first(group) for group in groups.values()]
    return [first, *best_first(others, lambda group: group[0].counted_seconds)]


def _best_slices_first(variants: Sequence[_Variant]) -> list[_Variant]:
    """Of slices that look as good as the best but for a twentieth, the smallest first: they leave most memory."""
    if len(variants) < 2:
        return list(variants)
    least = min(variant.counted_seconds for variant in variants)
    good = [variant for variant in variants if variant.counted_seconds <= least * _AS_GOOD]
    others = [variant for variant in variants if variant not in good]
    return [*reversed(good), *sorted(others, key=lambda variant: variant.counted_seconds)]


def _first_that_fits(variants: Sequence[_Variant]) -> tuple[_Variant, list[AnnouncedPlan]] | None:
    """With its plans."""
    fitting = ((variant, list(candidates(variant.wish))) for variant in variants)
    return next(((variant, plans) for variant, plans in fitting if plans), None)


def _quickest(variant: _Variant, plans: Sequence[AnnouncedPlan], best: _Found | None) -> _Found | None:
    """Of these plans the one with the shortest step; None if none is worth giving up what was found before."""
    floors = {id(plan): variant.least_seconds(plan) for plan in plans}
    found: list[_Found] = []
    for plan in best_first(plans, lambda plan: floors[id(plan)])[:_MOST_RUN_ON_PAPER]:
        floor = floors[id(plan)]
        if best is not None and found and floor * found[0].over_floor >= best.seconds * _AS_GOOD:
            # Plans of a variant are much alike: as far as the first is above its floor, so will this one be.
            break
        # A step takes no less than its floor.
        if floor < min((other.seconds for other in (best, *found) if other), default=inf):
            found.append(_Found(variant, plan, floor, variant.seconds(plan)))
    chosen = next(iter(best_first(found, lambda one: one.seconds)), None)
    if chosen is None or best is None:
        return chosen
    return chosen if chosen.seconds < best.seconds * (1 - WORTH) else None


def _plan_of(request: Request, found: _Found) -> Plan:
    variant, announced = found.variant, found.announced
    problem, kind, homes = variant.wish.problem, variant.kind_of(announced), homes_of(announced)
    return Plan(
        machine=request.machine,
        model=variant.model,
        announced=announced,
        kind=kind,
        settings=_settings(request, problem.config, homes, kind) | _budgets(request.config, announced.limits),
        homes=homes,
        estimate=estimate(announced, variant.model, request.machine, kind, baseline_bytes=request.baseline_bytes),
        reasons=reasons_of(problem, homes, announced.limits, found.least_seconds, variant.least_seconds),
    )


def _variants(request: Request) -> Iterator[_Variant | BudgetError]:
    """What "auto" leaves open, filled in, or why that cannot fit; what computes least again comes first."""
    kinds: KindsFound = {}
    for config in _settings_to_try(request):
        try:
            yield _variant_of(request, config, kinds)
        except BudgetError as error:
            yield error


def _settings_to_try(request: Request) -> Iterator[OffloadConfig]:
    config = request.config
    if not config.nvme_paths and request.machine.drives:
        config = config.model_copy(update={"nvme_paths": tuple(Path(drive.path) for drive in request.machine.drives)})
    formats = dict.fromkeys([config.moments, *request.may_use_moments])
    for activations, size, moments in product(_activations(config), _slice_sizes(request), formats):
        chosen = {"moments": moments, "micro_batch_size": size, "activations": activations}
        yield config.model_copy(update=chosen)


def _slice_sizes(request: Request) -> list[int | None]:
    size = request.config.micro_batch_size
    if size != "auto":
        return [size]
    batch = request.batch_size
    return [None, *(number for number in range(batch - 1, 0, -1) if batch % number == 0)]


def _activations(config: OffloadConfig) -> list[ActivationChoice]:
    if config.activations != "auto":
        return [config.activations]
    return ["auto", "host", "nvme"] if config.nvme_paths else ["auto", "host"]


def _variant_of(request: Request, config: OffloadConfig, kinds: KindsFound) -> _Variant:
    problem = request.problem_of(config)
    model = request.profile_of(_slice_size(request, config))
    kind = _kind(request, config, problem)
    if problem.block_inputs.homes:
        problem = request.problem_of(_with_room_for_inputs(config, problem, model, kind))
    return _Variant(_wish(request, problem, model, kind, kinds), model)


def _with_room_for_inputs(
    config: OffloadConfig, problem: PlacementProblem, profile: ModelProfile, kind: StepKind
) -> OffloadConfig:
    """The settings with what the inputs of blocks will take set aside, where the user has not said how much."""
    nbytes_of = {work.name: work.input_nbytes * kind.num_slices for work in profile.units}
    needed = inputs_nbytes(problem.block_inputs.homes, nbytes_of, problem.reach)
    memory = {**{tier.value: nbytes for tier, nbytes in needed.items()}, **config.activation_memory}
    return config.model_copy(update={"activation_memory": memory})


def _slice_size(request: Request, config: OffloadConfig) -> int:
    return config.micro_batch_size if isinstance(config.micro_batch_size, int) else request.batch_size


def _wish(
    request: Request,
    problem: PlacementProblem,
    profile: ModelProfile,
    kind: StepKind,
    kinds: KindsFound,
) -> Wish:
    speeds = speeds_of(request.machine)
    shares_host = request.machine.device.shares_host_memory
    activations = activation_bytes(profile, kind, leased=problem.block_inputs.homes)
    tiers = [] if shares_host else [TierName.DEVICE]
    tiers += [TierName.HOST, *([TierName.NVME] if problem.config.nvme_paths else [])]
    return Wish(
        problem=problem,
        limits=limits_on(request.machine, problem.config, max(activations.values())),
        speeds=speeds,
        kind=kind,
        order=[work.name for work in profile.units],
        passes=pass_costs(problem, profile, kind, speeds),
        tiers=tiers,
        kinds=kinds,
    )


def _schedule(config: OffloadConfig, plan: AnnouncedPlan) -> UpdateMode:
    """As a run chooses it, where clipping does not fire."""
    if config.update != "auto":
        return UpdateMode(config.update)
    if not plan.placement.update_uses_other_resources:
        return UpdateMode.AFTER_BACKWARD
    return UpdateMode.DURING_BACKWARD if may_go_ahead(plan.placement) else UpdateMode.UNDER_NEXT_FORWARD


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
    nvme_limit = (UNBOUNDED_NBYTES if unbounded else space) if config.nvme_space is None else config.nvme_space
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
    tiers = {state: {name: getattr(of_unit, state) for name, of_unit in homes.items()} for state in STATES}
    return {state: _shortest(of_units) for state, of_units in tiers.items()}


def _shortest(of_units: Mapping[str, TierName]) -> str | dict[str, str]:
    """One tier for all, or one for each unit, and one for what is left."""
    tiers = list(of_units.values())
    if len(set(tiers)) == 1:
        return tiers[0].value
    usual = max(set(tiers), key=tiers.count)
    others = {escape(name): tier.value for name, tier in of_units.items() if tier is not usual}
    return {**others, "*": usual.value}


def _settings(request: Request, config: OffloadConfig, homes: Mapping[str, Homes], kind: StepKind) -> dict[str, Any]:
    """What the plan chose."""
    found: dict[str, Any] = settings_of(homes)
    for name in ("moments", "micro_batch_size", "activations", "activation_memory"):
        if getattr(config, name) != getattr(request.config, name):
            found[name] = getattr(config, name)
    if config.nvme_paths != request.config.nvme_paths and (
        TierName.NVME in _tiers(homes) or config.keeps_activations_on_nvme
    ):
        found["nvme_paths"] = tuple(str(path) for path in config.nvme_paths)
    if request.config.update == "auto":
        found["update"] = kind.schedule.value
    return found


def _budgets(config: OffloadConfig, limits: Limits) -> dict[str, int]:
    """Those that the user has not set: without them a run would take what activations are to have."""
    found = {}
    if config.host_memory is None:
        found["host_memory"] = limits.host_bytes
    if config.device_memory is None and not limits.device_shares_host:
        found["device_memory"] = limits.device_bytes
    return found


def _tiers(homes: Mapping[str, Homes]) -> set[TierName]:
    return {tier for of_unit in homes.values() for tier in (of_unit.params, of_unit.optimizer, of_unit.gradients)}


def _kind(request: Request, config: OffloadConfig, problem: PlacementProblem) -> StepKind:
    size = _slice_size(request, config)
    if request.batch_size % size:
        raise ConfigError(f"a batch of {request.batch_size} is no multiple of micro_batch_size, {size}")
    hides = config.nvme_paths or not problem.reach.device_shares_host
    return StepKind(
        schedule=UpdateMode.UNDER_NEXT_FORWARD if hides else UpdateMode.AFTER_BACKWARD,
        accumulation=config.accumulation_steps or 1,
        computed_again=request.computed_again | frozenset(problem.block_inputs.homes),
        num_slices=request.batch_size // size,
        whole=problem.block_inputs.whole,
        clips=request.clips,
    )
