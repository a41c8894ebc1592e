"""What each tier holds in each phase of a step. Pure.

Every statement has three lines: the process before the run, what is leased, and activations with their temporaries.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from zerooffload.config import TierName
from zerooffload.planner.admission import UNBOUNDED_NBYTES, AnnouncedPlan
from zerooffload.planner.cost.step import StepKind
from zerooffload.planner.placement import Claim
from zerooffload.planner.profiles import ModelProfile, UnitWork


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """One tier's bytes, on one rank.

    Attributes
    ----------
    tier : TierName
    budget_bytes : int
        The most that may be leased.
    claims : tuple[Claim, ...]
        The leases, exactly. On a CPU those of the device tier count in the host's.
    baseline_bytes : int, optional
        Of the process before the run; None where it is not known.
    activations : Mapping[str, int]
        The most in "forward", "backward" and "update": predicted.
    """

    tier: TierName
    budget_bytes: int
    claims: tuple[Claim, ...]
    baseline_bytes: int | None
    activations: Mapping[str, int]

    @property
    def is_bounded(self) -> bool:
        """Whether there is a budget: of drives whose space nobody told there is none."""
        return self.budget_bytes < UNBOUNDED_NBYTES

    @property
    def leased_bytes(self) -> int:
        """All claims."""
        return sum(claim.nbytes for claim in self.claims)

    @property
    def peak_bytes(self) -> int:
        """The three lines together, at the most."""
        return (self.baseline_bytes or 0) + self.leased_bytes + max(self.activations.values(), default=0)


def memory_accounts(
    plan: AnnouncedPlan, model: ModelProfile, kind: StepKind, *, baseline_bytes: int | None = None
) -> tuple[MemoryAccount, ...]:
    """Those of the three tiers."""
    shares_host = plan.limits.device_shares_host
    computes_in = TierName.HOST if shares_host else TierName.DEVICE
    activations = activation_bytes(model, kind, leased=plan.placement.block_inputs.homes)
    return tuple(
        MemoryAccount(
            tier=tier,
            budget_bytes=plan.limits.of(tier),
            claims=tuple(claim for claim in plan.claims if _counts_in(claim.tier, tier, shares_host=shares_host)),
            baseline_bytes=baseline_bytes if tier is TierName.HOST else None,
            activations=activations if tier is computes_in else {},
        )
        for tier in TierName
    )


def activation_bytes(model: ModelProfile, kind: StepKind, *, leased: Container[str] = ()) -> dict[str, int]:
    """The most that activations and temporaries take in each phase.

    Parameters
    ----------
    leased : Container[str]
        Units that are computed again whose inputs are leased: they count there.
    """
    forward = backward = before = 0
    for work in model.units:
        num_at_once = kind.num_at_once(work.name)
        forward = max(forward, before + work.forward_peak_nbytes * num_at_once)
        kept = _kept(work, kind, leased)
        inside = work.backward_peak_nbytes * num_at_once
        if work.name in kind.computed_again:
            inside = max(inside, work.forward_peak_nbytes * num_at_once) + kept
        backward = max(backward, before + inside)
        before += kept
    return {"forward": max(forward, before), "backward": max(backward, before), "update": 0}


def _kept(work: UnitWork, kind: StepKind, leased: Container[str]) -> int:
    if work.name in kind.computed_again:
        return 0 if work.name in leased else work.input_nbytes * kind.num_slices
    return work.saved_nbytes * kind.num_at_once(work.name)


def _counts_in(claimed: TierName, tier: TierName, *, shares_host: bool) -> bool:
    return claimed is tier or (shares_host and tier is TierName.HOST and claimed is TierName.DEVICE)


def largest(claims: Sequence[Claim], number: int) -> list[Claim]:
    """The largest of them, the largest first."""
    return sorted(claims, key=lambda claim: -claim.nbytes)[:number]
