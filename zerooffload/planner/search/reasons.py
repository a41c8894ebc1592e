"""Why a plan puts states where they are, and what that costs. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerooffload.config import TierName
from zerooffload.formats import format_bytes, format_seconds
from zerooffload.planner.admission import BUDGET_FIELDS, UNBOUNDED_NBYTES, AnnouncedPlan, Limits
from zerooffload.planner.plan import STATES, Homes, State, choices_from
from zerooffload.planner.problem import PlacementProblem

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class _Group:
    """Units whose state has a home that is not the nearest."""

    state: State
    tier: TierName
    units: tuple[str, ...]


def reasons_of(
    problem: PlacementProblem,
    homes: Mapping[str, Homes],
    limits: Limits,
    seconds: float,
    seconds_of: Callable[[AnnouncedPlan], float],
) -> tuple[str, ...]:
    """For each state away from the nearest tier, what keeps it away and what that costs, the costliest first.

    Parameters
    ----------
    seconds : float
        What a step takes with these homes.
    seconds_of : callable
        What a step of another plan takes.
    """
    nearest = TierName.HOST if limits.device_shares_host else TierName.DEVICE
    told = []
    for group in _groups(homes, nearest):
        nearer = _nearer(group.tier)
        other = _with(problem, homes, group, nearer, limits)
        if other is None:
            continue
        cost = max(0.0, seconds - seconds_of(other))
        need = other.planned_bytes(nearer) - limits.of(nearer)
        told.append(
            (cost, f"{shortened(group.units)}: {group.state} on {group.tier.value}: {_why(nearer, need, cost)}")
        )
    return tuple(text for _, text in sorted(told, key=lambda item: -item[0]))


def _why(nearer: TierName, need_bytes: int, cost_seconds: float) -> str:
    full = f"{BUDGET_FIELDS[nearer]} is {format_bytes(need_bytes)} short of all of it" if need_bytes > 0 else ""
    costs = f"costs {format_seconds(cost_seconds)} a step" if cost_seconds > 1e-4 else "costs no time"
    return f"{full}; {costs}" if full else costs


def _nearer(tier: TierName) -> TierName:
    return TierName.HOST if tier is TierName.NVME else TierName.DEVICE


def _groups(homes: Mapping[str, Homes], nearest: TierName) -> list[_Group]:
    groups: dict[tuple[State, TierName], list[str]] = {}
    for name, of_unit in homes.items():
        for state in STATES:
            tier = getattr(of_unit, state)
            if tier is not nearest and tier is not TierName.DEVICE:
                groups.setdefault((state, tier), []).append(name)
    return [_Group(state, tier, tuple(units)) for (state, tier), units in groups.items()]


def _with(
    problem: PlacementProblem, homes: Mapping[str, Homes], group: _Group, tier: TierName, limits: Limits
) -> AnnouncedPlan | None:
    """The plan with a group's state nearer, whatever the budgets say."""
    changed = {name: replace(homes[name], **{group.state: tier}) for name in group.units}
    plan = problem.fitted(choices_from({**homes, **changed}), _without_bounds(limits))
    return plan.with_cache() if isinstance(plan, AnnouncedPlan) else None


def _without_bounds(limits: Limits) -> Limits:
    most = UNBOUNDED_NBYTES
    return replace(limits, device_bytes=most, host_bytes=most, nvme_bytes=most)


def shortened(names: Sequence[str]) -> str:
    """Names that differ by a number alone as a range: "layers.0-11"."""
    runs: list[tuple[str, list[int], str]] = []
    for name in names:
        match = _NUMBERED.match(name)
        prefix, number, rest = (match[1], int(match[2]), name[match.end() :]) if match else (name, -1, "")
        if match and runs and runs[-1][0] == prefix and runs[-1][2] == rest:
            runs[-1][1].append(number)
        else:
            runs.append((prefix, [number] if match else [], rest))
    return ", ".join(f"{prefix}{_numbers(numbers)}{rest}" for prefix, numbers, rest in runs)


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return "".join(str(number) for number in numbers)
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return f"{{{len(numbers)} of {numbers[0]}-{numbers[-1]}}}"
