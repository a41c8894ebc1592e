"""A plan: where everything will be, what that takes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerooffload.config import TierName
from zerooffload.formats import format_bytes, format_seconds
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.cost import Estimate, StepKind
from zerooffload.planner.profiles import MachineProfile, ModelProfile


@dataclass(frozen=True, kw_only=True)
class Homes:
    """The home tier of each unit's states.

    Attributes
    ----------
    params, optimizer, gradients : TierName
        The last two are of no account for a unit with nothing to train.
    """

    params: TierName
    optimizer: TierName
    gradients: TierName


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `find_plan` found.

    Attributes
    ----------
    machine : MachineProfile
    model : ModelProfile
        Of a forward, or of one slice of it.
    announced : AnnouncedPlan
        What a rank will lease, exactly.
    kind : StepKind
        When updates run, how often backward runs, what is computed again.
    settings : Mapping[str, Any]
        The `OffloadConfig` fields that the plan chose, as values of one: `OffloadConfig(**(given | settings))` is the
        run that was planned.
    homes : Mapping[str, Homes]
        By unit.
    estimate : Estimate
    reasons : tuple[str, ...]
        Why it is so, the costliest choice first.
    """

    machine: MachineProfile
    model: ModelProfile
    announced: AnnouncedPlan
    kind: StepKind
    settings: Mapping[str, Any]
    homes: Mapping[str, Homes]
    estimate: Estimate
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """The plan in some lines."""
        step = self.estimate
        lines = [
            f"a step takes {format_seconds(step.seconds)}, {step.tokens_per_second:.0f} tokens/s; bound: {step.bound}",
            *(f"  {name}: {value}" for name, value in self.settings.items()),
        ]
        for account in step.memory:
            if account.peak_bytes:
                most = max(account.activations.values(), default=0)
                lines.append(
                    f"{account.tier.value}: {format_bytes(account.leased_bytes)} leased of"
                    f" {format_bytes(account.budget_bytes)}"
                    + (f", {format_bytes(most)} of activations" if most else "")
                )
        return "\n".join([*lines, *self.reasons])
