"""Homes that are worth a closer look: some that the search counts as best, and the plain ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, product
from math import inf, prod
from typing import TypeAlias, TypeVar

import numpy as np

from zerooffload.config import MomentFormat, TierName, UpdateMode
from zerooffload.planner.admission import AnnouncedPlan, Limits, Misfit, claimed_bytes
from zerooffload.planner.cost import Speeds, StepKind
from zerooffload.planner.placement import TierChoices, UnitHomes, home_tier, is_auto
from zerooffload.planner.plan import Homes, choices_from
from zerooffload.planner.problem import PlacementProblem, choices_of
from zerooffload.planner.search.homes import WORTH, Best, Counts, HomeSearch, Setting
from zerooffload.planner.search.kinds import TIERS, Kind, Vector, kinds_of
from zerooffload.planner.search.passes import IDLE, PassCosts

T = TypeVar("T")
KindsFound: TypeAlias = dict[tuple[MomentFormat, bool], list[Kind]]
"""Of units, by the format of moments and whether second places are counted: of what a plan chooses, or a refusal
proposes, costs of homes depend on these alone."""
Searched: TypeAlias = dict[tuple[bytes, bool], Best | None]
"""What a search finds, by its budgets and whether second places are counted: nothing else changes for a wish."""
_Fitting: TypeAlias = tuple[TierChoices, AnnouncedPlan]
"""Homes, and the plan with them."""

_MOST_COMBINATIONS = 1000
_HOST_PARTS = (1.0, 0.5)
"""Of the host's budget, what homes are searched in: those that half of it leads to can be better than those of all."""
_MOST_TRIES = 12
"""Of shrinking the budgets until what does not depend on homes (rings, windows) has room beside them."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """For what homes are wanted.

    Attributes
    ----------
    problem : PlacementProblem
    limits : Limits
    speeds : Speeds
    kind : StepKind
    order : Sequence[str]
        Names of the units in the order of their forwards.
    passes : PassCosts
    tiers : Sequence[TierName]
        Where "auto" may put a state.
    kinds : KindsFound
        As far as they have been asked for. Wishes of one request share them.
    searched : Searched
        As far as has been searched. A wish that is changed begins anew.
    """

    problem: PlacementProblem
    limits: Limits
    speeds: Speeds
    kind: StepKind
    order: Sequence[str]
    passes: PassCosts = IDLE
    tiers: Sequence[TierName]
    kinds: KindsFound = field(default_factory=dict)
    searched: Searched = field(default_factory=dict, init=False)


def counted_seconds(wish: Wish) -> float:
    """What a step takes, as the search counts in homes that need not fit: quick, to compare wishes that are much alike.

    Infinite where not even homes alone fit.
    """
    doubled = _places(wish)[-1]
    best = _search(wish, _setting(wish, host_part=1.0, doubled=doubled), doubled=doubled)
    return inf if best is None else best.seconds


def candidates(wish: Wish) -> Iterator[AnnouncedPlan]:
    """Plans that fit, each with other homes; the first that fits at all where none of those that look best does."""
    found: list[TierChoices] = []
    for choices, plan in chain(_fitting(wish, _plain(wish)), _searches(wish)):
        if choices not in found:
            found.append(choices)
            yield plan.with_cache()
    if not found:
        yield from (plan.with_cache() for _, plan in islice(_fitting(wish, _by_kind(wish)), 1))


def best_first(plans: Iterable[T], seconds_of: Callable[[T], float]) -> list[T]:
    """The quickest first; of those that are as quick but for a thousandth, the one that came first."""
    timed = [(seconds_of(plan), number, plan) for number, plan in enumerate(plans)]
    ordered: list[T] = []
    while timed:
        least = min(seconds for seconds, _, _ in timed)
        chosen = next(item for item in timed if item[0] <= least * (1 + WORTH))
        timed.remove(chosen)
        ordered.append(chosen[2])
    return ordered


def _fitting(wish: Wish, several: Iterable[TierChoices]) -> Iterator[_Fitting]:
    for choices in several:
        plan = wish.problem.fitted(choices, wish.limits)
        if isinstance(plan, AnnouncedPlan):
            yield choices, plan


def _by_kind(wish: Wish) -> Iterator[TierChoices]:
    """Every combination of homes for each kind of unit, or, if those are too many, the same for all units."""
    kinds = _kinds(wish, doubled=False)
    if prod(len(kind.costs) for kind in kinds) <= _MOST_COMBINATIONS:
        combinations: Iterator[tuple[int, ...]] = product(*(range(len(kind.costs)) for kind in kinds))
    else:
        most = max(len(kind.costs) for kind in kinds)
        combinations = (tuple(min(number, len(kind.costs) - 1) for kind in kinds) for number in range(most))
    for combination in combinations:
        counts = [np.zeros(len(kind.costs), dtype=np.int64) for kind in kinds]
        for count, kind, chosen in zip(counts, kinds, combination, strict=True):
            count[chosen] = len(kind.units)
        yield _spread(wish, kinds, counts)


def all_choices(wish: Wish) -> Iterator[TierChoices]:
    """Homes that may fit, the plain ones first."""
    yield from _plain(wish)
    yield from (choices for choices, _ in _searches(wish))


def _searches(wish: Wish) -> Iterator[_Fitting]:
    """Homes that the search counts as best, with second places and without, in all of the host's budget and in less."""
    if len(wish.tiers) > 1:
        for host_part, doubled in product(_HOST_PARTS, _places(wish)):
            found = _searched(wish, host_part=host_part, doubled=doubled)
            if found is not None:
                yield found


def _plain(wish: Wish) -> Iterator[TierChoices]:
    """Every state that is free in one tier; parameters and gradients in one, the optimizer in the next."""
    for tier in wish.tiers:
        yield _with_all_in(wish, Homes(params=tier, optimizer=tier, gradients=tier))
    for near, far in zip(wish.tiers, wish.tiers[1:], strict=False):
        yield _with_all_in(wish, Homes(params=near, optimizer=far, gradients=near))


def _with_all_in(wish: Wish, homes: Homes) -> TierChoices:
    choices = choices_of(wish.problem.config)
    tiers = []
    for choice, tier in (
        (choices.params, homes.params),
        (choices.optimizer, homes.optimizer),
        (choices.gradients, homes.gradients),
    ):
        names = [layout.name for layout in wish.problem.layouts]
        tiers.append(UnitHomes({name: tier if is_auto(choice, name) else home_tier(choice, name) for name in names}))
    return TierChoices(*tiers)


def _places(wish: Wish) -> tuple[bool, ...]:
    """Whether second places are counted: not, and, where there may be some, they are."""
    may_have = wish.problem.wants_second_places and not wish.problem.reach.device_shares_host
    return (False, True) if may_have else (False,)


def _kinds(wish: Wish, *, doubled: bool) -> list[Kind]:
    key = wish.problem.config.moments, doubled
    if key not in wish.kinds:
        wish.kinds[key] = kinds_of(wish.problem, wish.kind, wish.speeds, wish.order, tiers=wish.tiers, doubled=doubled)
    return wish.kinds[key]


def _search(wish: Wish, setting: Setting, *, doubled: bool) -> Best | None:
    key = setting.limits.tobytes(), doubled
    if key not in wish.searched:
        wish.searched[key] = HomeSearch(_kinds(wish, doubled=doubled), setting).run()
    return wish.searched[key]


def _searched(wish: Wish, *, host_part: float, doubled: bool) -> _Fitting | None:
    kinds, setting = _kinds(wish, doubled=doubled), _setting(wish, host_part=host_part, doubled=doubled)
    fitted = wish.problem.fitted_ahead if doubled else wish.problem.fitted
    for _ in range(_MOST_TRIES):
        best = _search(wish, setting, doubled=doubled)
        if best is None:
            return None
        choices = _spread(wish, kinds, best.counts)
        plan = fitted(choices, wish.limits)
        if isinstance(plan, AnnouncedPlan):
            return choices, plan
        setting = replace(setting, limits=_smaller(setting.limits, plan, wish.limits, best.nbytes))
    return None


def _setting(wish: Wish, *, host_part: float, doubled: bool) -> Setting:
    shares_host = wish.problem.reach.device_shares_host
    budgets = _nbytes(wish.limits.of) - _nbytes(partial(claimed_bytes, wish.problem.block_inputs.claims, wish.limits))
    budgets[TIERS.index(TierName.HOST)] *= host_part
    schedule = UpdateMode.DURING_BACKWARD if doubled else wish.kind.schedule
    return Setting(
        limits=np.maximum(0.0, budgets),
        window_tier=TIERS.index(TierName.HOST if shares_host else TierName.DEVICE),
        passes=wish.passes,
        step=replace(wish.kind, schedule=schedule),
        speeds=wish.speeds,
        shares_host=shares_host,
    )


def _smaller(budgets: Vector, misfit: Misfit, limits: Limits, homes_nbytes: Vector) -> Vector:
    """Budgets for homes with which these, and what lies beside them on each tier, would have fitted."""
    excess = _nbytes(partial(claimed_bytes, misfit.claims, limits)) - _nbytes(limits.of)
    # What homes left free of their budget is no room for what lies beside them.
    return np.where(excess > 0, np.minimum(budgets, homes_nbytes) - excess, budgets)


def _nbytes(of_tier: Callable[[TierName], int]) -> Vector:
    return np.array([of_tier(tier) for tier in TIERS], dtype=np.float64)


def _spread(wish: Wish, kinds: Sequence[Kind], counts: Counts) -> TierChoices:
    """Units of a kind with other homes lie between each other, so that a step asks evenly for each resource."""
    homes: dict[str, Homes] = {}
    for kind, count in zip(kinds, counts, strict=True):
        given = np.zeros(len(count))
        for number, name in enumerate(kind.units, 1):
            behind = count * number / len(kind.units) - given
            chosen = int(np.argmax(behind))
            given[chosen] += 1
            homes[name] = kind.costs[chosen].homes
    plain = Homes(params=TierName.HOST, optimizer=TierName.HOST, gradients=TierName.HOST)
    names = [layout.name for layout in wish.problem.layouts]
    return choices_from({name: homes.get(name, plain) for name in names})
