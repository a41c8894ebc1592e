"""What to tell where nothing fits: which tier, what is needed and had, who needs it, the smallest change that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerooffload.config import MomentFormat, OffloadConfig, TierName
from zerooffload.errors import BudgetError
from zerooffload.planner.admission import BUDGET_FIELDS, UNBOUNDED_NBYTES, AnnouncedPlan, Limits, Misfit, refusal
from zerooffload.planner.search.candidates import Wish, all_choices

_SMALLER: tuple[MomentFormat, ...] = ("bf16", "8bit")


@dataclass(frozen=True)
class _Need:
    """The least that some homes need of a tier, where they fit the others."""

    more_bytes: int
    misfit: Misfit

    @property
    def change(self) -> str:
        """The budget that is enough."""
        return f'{BUDGET_FIELDS[self.misfit.tier]} = "{self.misfit.need_bytes}B" ({self.more_bytes} bytes more)'


def shortfall(wish: Wish) -> BudgetError:
    """The error for a wish that no homes fulfil."""
    needs = [need for tier in TierName if (need := _least_need(wish, tier)) is not None]
    needs.sort(key=lambda need: need.more_bytes)
    misfit = needs[0].misfit if needs else _nearest(wish)
    larger = [need.change for need in needs]
    return BudgetError(refusal(misfit, wish.limits, larger=larger, settings=list(_other_settings(wish))))


def _nearest(wish: Wish) -> Misfit:
    """No single budget is to blame."""
    misfits = [fitted for fitted in _fits(wish) if isinstance(fitted, Misfit)]
    return min(misfits, key=lambda misfit: misfit.need_bytes / max(1, wish.limits.of(misfit.tier)))


def _fits(wish: Wish) -> Iterator[AnnouncedPlan | Misfit]:
    for choices in all_choices(wish):
        yield wish.problem.fitted(choices, wish.limits)


def _least_need(wish: Wish, tier: TierName) -> _Need | None:
    if tier is TierName.DEVICE and wish.limits.device_shares_host:
        return None
    enough, nothing = (_with(wish.limits, tier, nbytes) for nbytes in (UNBOUNDED_NBYTES, 0))
    found = []
    for choices in all_choices(replace(wish, limits=enough)):
        if isinstance(wish.problem.fitted(choices, enough), AnnouncedPlan):
            misfit = wish.problem.fitted(choices, nothing)
            if isinstance(misfit, Misfit):
                found.append(_Need(misfit.need_bytes - wish.limits.of(tier), misfit))
    return min(found, key=lambda need: need.more_bytes, default=None)


def _with(limits: Limits, tier: TierName, nbytes: int) -> Limits:
    match tier:
        case TierName.DEVICE:
            return replace(limits, device_bytes=nbytes)
        case TierName.HOST:
            device_bytes = nbytes if limits.device_shares_host else limits.device_bytes
            return replace(limits, host_bytes=nbytes, device_bytes=device_bytes)
        case TierName.NVME:
            return replace(limits, nvme_bytes=nbytes)


def _other_settings(wish: Wish) -> Iterator[str]:
    """Settings that make it fit within the budgets as they are."""
    config = wish.problem.config
    if not config.nvme_paths:
        yield "nvme_paths, a folder on a drive"
    if config.atomic_steps and not config.durable and _would_fit(wish, config, {"atomic_steps": False}):
        yield "atomic_steps = false (a crash then costs all steps since the last checkpoint)"
    for moments in _SMALLER:
        if config.moments == "fp32" and _would_fit(wish, config, {"moments": moments}):
            yield f'moments = "{moments}" (changes the numbers)'
            break


def _would_fit(wish: Wish, config: OffloadConfig, changes: dict[str, object]) -> bool:
    other = replace(wish, problem=replace(wish.problem, config=config.model_copy(update=changes)))
    return any(isinstance(fitted, AnnouncedPlan) for fitted in _fits(other))
