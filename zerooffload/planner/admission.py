"""The announced plan: what each tier will hold, checked against the budgets before anything is allocated. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerooffload.config import HomeTier, TierName
from zerooffload.errors import BudgetError
from zerooffload.formats import format_bytes
from zerooffload.planner.placement import NUM_STAGING_SLOTS, Claim, Placement, TierChoices, with_sharers
from zerooffload.tiers.staging import CACHE_HOLDER, ring_nbytes

UNBOUNDED_NBYTES = 1 << 62
"""The limit of drives whose space nobody told, and of what is asked for as if there was no limit."""
_WINDOW = "parameters in use"
_COLLECTION = "gradient collection"


DEFAULT_PART = 0.75
"""Of what a tier has available, where the user names no bound: the rest is for activations and for others."""


@dataclass(frozen=True)
class Limits:
    """Bytes that each tier may hold. Where the device shares host memory, its bytes count in the host's too.

    Attributes
    ----------
    spare_host_bytes : int
        What windows leave of the host's beyond their least, for checkpoints.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    device_shares_host: bool
    spare_host_bytes: int = 0

    def of(self, tier: TierName) -> int:
        """The limit of a tier."""
        return {
            TierName.DEVICE: self.device_bytes,
            TierName.HOST: self.host_bytes,
            TierName.NVME: self.nvme_bytes,
        }[tier]


@dataclass(frozen=True)
class AnnouncedPlan:
    """What the run will lease, exactly.

    Attributes
    ----------
    placement : Placement
    limits : Limits
    window_nbytes, collection_nbytes : int
        Device bytes of the window of parameters in use, and of the gradients being collected.
    claims : tuple[Claim, ...]
        All leases of the run.
    num_cached_slots : int
        Slots that make the staging ring longer than work needs, from host memory that nobody else wants.
    """

    placement: Placement
    limits: Limits
    window_nbytes: int
    collection_nbytes: int
    claims: tuple[Claim, ...]
    num_cached_slots: int = 0

    def with_windows(self, window_nbytes: int, collection_nbytes: int) -> AnnouncedPlan:
        """The plan with windows of other sizes: those that every rank has room for."""
        others = tuple(claim for claim in self.claims if claim.holder not in (_WINDOW, _COLLECTION))
        claims = (*others, *_claim(_COLLECTION, collection_nbytes), *_claim(_WINDOW, window_nbytes))
        return replace(self, window_nbytes=window_nbytes, collection_nbytes=collection_nbytes, claims=claims)

    def with_sharers(self, num_sharers: int) -> AnnouncedPlan:
        """The plan for a rank that has one host copy with so many; see `placement.with_sharers`."""
        placement = with_sharers(self.placement, num_sharers)
        cache = (claim for claim in self.claims if claim.holder == CACHE_HOLDER)
        plan = replace(self, placement=placement, claims=(*placement.fixed_claims(), *cache))
        return plan.with_windows(self.window_nbytes, self.collection_nbytes)

    def with_cache(self) -> AnnouncedPlan:
        """The plan with as many further slots in the staging ring as host memory is left for, and chunks there are."""
        slot_nbytes = self.placement.slot_nbytes
        if not slot_nbytes or self.num_cached_slots:
            return self
        room = self.limits.host_bytes - self.planned_bytes(TierName.HOST)
        wanted = self.placement.num_staged_chunks - NUM_STAGING_SLOTS
        num_slots = max(0, min(wanted, room // slot_nbytes))
        cache = Claim(TierName.HOST, CACHE_HOLDER, ring_nbytes(num_slots, slot_nbytes))
        return replace(self, num_cached_slots=num_slots, claims=(*self.claims, cache) if num_slots else self.claims)

    @property
    def leaves_spare(self) -> bool:
        """Whether the host has room for checkpoints."""
        return self.limits.host_bytes - self.planned_bytes(TierName.HOST) >= self.limits.spare_host_bytes

    def planned_bytes(self, tier: TierName) -> int:
        """All claims on a tier's budget."""
        return claimed_bytes(self.claims, self.limits, tier)


def announce(
    placement: Placement, limits: Limits, choices: TierChoices, retry: Callable[[TierChoices], Placement]
) -> AnnouncedPlan:
    """Fix the sizes that depend on the budgets.

    Parameters
    ----------
    retry : callable
        Places again under other choices; asked for what would help if this does not fit.

    Raises
    ------
    BudgetError
        If the least that the run needs does not fit, with the holders and the smallest changes that help.
    """
    plan = fit(placement, limits)
    if isinstance(plan, AnnouncedPlan):
        return plan
    more = f'{BUDGET_FIELDS[plan.tier]} = "{plan.need_bytes}B" ({plan.need_bytes - limits.of(plan.tier)} bytes more)'
    raise BudgetError(refusal(plan, limits, larger=[more], settings=_alternatives(choices, limits, retry)))


@dataclass(frozen=True)
class Misfit:
    """The first tier that cannot hold the least that a run needs of it.

    Attributes
    ----------
    tier : TierName
    need_bytes : int
    claims : tuple[Claim, ...]
        Of all tiers.
    """

    tier: TierName
    need_bytes: int
    claims: tuple[Claim, ...]


def fit(placement: Placement, limits: Limits) -> AnnouncedPlan | Misfit:
    """Fix the sizes that depend on the budgets, or tell why it does not fit them."""
    collection = placement.collection
    # Twice the largest lets one unit's gradients leave while the next one's gather.
    wish = min(collection.most_nbytes, 2 * collection.least_nbytes)
    fixed = tuple(placement.fixed_claims())
    plans = [_fit_collecting(placement, fixed, limits, nbytes) for nbytes in (wish, collection.least_nbytes)]
    for plan in plans:
        if isinstance(plan, AnnouncedPlan) and plan.leaves_spare:
            return plan
    return plans[0] if isinstance(plans[0], AnnouncedPlan) else plans[1]


def _fit_collecting(
    placement: Placement, fixed: tuple[Claim, ...], limits: Limits, collection_nbytes: int
) -> AnnouncedPlan | Misfit:
    window = placement.window
    claims = (*fixed, *_claim(_COLLECTION, collection_nbytes))
    least = (*claims, *_claim(_WINDOW, window.least_nbytes))
    misfit = _first_misfit(least, limits)
    if misfit is not None:
        return misfit
    window_nbytes = min(window.most_nbytes, window.least_nbytes + _room(least, limits))
    full = (*claims, *_claim(_WINDOW, window_nbytes))
    plan = AnnouncedPlan(placement, limits, window_nbytes, collection_nbytes, full)
    if not placement.reduces_in_order:
        return plan
    # Gradients that come in another order than they leave in all gather: what is left over is for them.
    most = max(placement.collection.most_nbytes, collection_nbytes)
    return plan.with_windows(window_nbytes, min(most, collection_nbytes + _room(full, limits)))


def _claim(holder: str, nbytes: int) -> tuple[Claim, ...]:
    return (Claim(TierName.DEVICE, holder, nbytes),) if nbytes else ()


def _first_misfit(claims: tuple[Claim, ...], limits: Limits) -> Misfit | None:
    # Host first: where it holds the device's bytes too, its need is the whole need.
    for tier in (TierName.HOST, TierName.DEVICE, TierName.NVME):
        need = claimed_bytes(claims, limits, tier)
        if need > limits.of(tier):
            return Misfit(tier, need, claims)
    return None


def claimed_bytes(claims: tuple[Claim, ...], limits: Limits, tier: TierName) -> int:
    """What claims take of a tier's budget."""
    return sum(claim.nbytes for claim in claims if _counts(claim, tier, limits))


def _counts(claim: Claim, tier: TierName, limits: Limits) -> bool:
    aliased = tier is TierName.HOST and claim.tier is TierName.DEVICE and limits.device_shares_host
    return claim.tier is tier or aliased


def _room(claims: tuple[Claim, ...], limits: Limits) -> int:
    room = limits.device_bytes - claimed_bytes(claims, limits, TierName.DEVICE)
    if limits.device_shares_host:
        left = limits.host_bytes - claimed_bytes(claims, limits, TierName.HOST)
        room = min(room, max(0, left - limits.spare_host_bytes))
    return room


BUDGET_FIELDS: Mapping[TierName, str] = {
    TierName.DEVICE: "device_memory",
    TierName.HOST: "host_memory",
    TierName.NVME: "nvme_space",
}
"""The settings that bound the tiers."""
_STATES: tuple[Literal["optimizer", "gradients", "params"], ...] = ("optimizer", "gradients", "params")


def _alternatives(choices: TierChoices, limits: Limits, retry: Callable[[TierChoices], Placement]) -> list[str]:
    """Single home tiers that would make the run fit."""
    found = []
    for state in _STATES:
        for tier in TierName:
            changed = _with(choices, state, tier)
            if changed != choices and isinstance(fit(retry(changed), limits), AnnouncedPlan):
                found.append(f'{state} = "{tier.value}"')
    return found


def _with(choices: TierChoices, state: Literal["optimizer", "gradients", "params"], tier: TierName) -> TierChoices:
    home: HomeTier = tier.value
    match state:
        case "optimizer":
            return replace(choices, optimizer=home)
        case "gradients":
            return replace(choices, gradients=home)
        case "params":
            return replace(choices, params=home)


def refusal(misfit: Misfit, limits: Limits, *, larger: Sequence[str], settings: Sequence[str]) -> str:
    """What a run that does not fit is refused with: the tier, need, have, holders, and changes that help.

    Parameters
    ----------
    larger, settings : Sequence[str]
        Budgets that would be enough, the smallest change first, and settings that make it fit within those there are.
    """
    limit, tier = limits.of(misfit.tier), misfit.tier
    rows = sorted((c for c in misfit.claims if _counts(c, tier, limits)), key=lambda claim: -claim.nbytes)
    lines = [
        (
            f"the run does not fit the {tier.value} budget: it needs {misfit.need_bytes} bytes"
            f" ({format_bytes(misfit.need_bytes)}), the budget is {limit} bytes ({format_bytes(limit)})"
        ),
        *(f"  {claim.holder:<22}{format_bytes(claim.nbytes):>12}  {claim.nbytes} bytes" for claim in rows),
    ]
    if larger:
        lines.append(f"smallest change: {'; or '.join(larger)}")
    if settings:
        lines.append(f"or, within the budgets as they are: {'; '.join(settings)}")
    return "\n".join(lines)
