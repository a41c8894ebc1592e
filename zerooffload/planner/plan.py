"""A plan: where everything will be, what that takes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from zerooffload.config import TierName
from zerooffload.formats import format_bytes, format_seconds
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.cost import Estimate, MemoryAccount, StepKind, speeds_of
from zerooffload.planner.cost.memory import largest
from zerooffload.planner.cost.speeds import even_rate
from zerooffload.planner.cost.step import floor_seconds
from zerooffload.planner.placement import FlatPlacement, TierChoices, UnitHomes
from zerooffload.planner.profiles import MachineProfile, ModelProfile

State = Literal["params", "optimizer", "gradients"]
STATES: tuple[State, ...] = get_args(State)


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


def choices_from(homes: Mapping[str, Homes]) -> TierChoices:
    """The homes of units as choices."""
    return TierChoices(*(UnitHomes({name: getattr(of, state) for name, of in homes.items()}) for state in STATES))


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

    @property
    def num_params(self) -> int:
        """Of the model; tied ones count once."""
        return sum(_num_params(flat) for unit in self.announced.placement.units for flat in unit.flats)

    @property
    def num_trained(self) -> int:
        """Parameters that are trained."""
        flats = [flat for unit in self.announced.placement.units for flat in unit.flats]
        return sum(_num_params(flat) for flat in flats if flat.layout.trainable)

    @property
    def floor_seconds(self) -> float:
        """The least that such a step could take, whatever waits for whatever; see docs/overlap.md."""
        return floor_seconds(self.announced, self.model, speeds_of(self.machine), self.kind)

    @property
    def drive_days(self) -> float | None:
        """Days of training until the first drive has been written what it bears.

        None if nothing is written, or it is not known what a drive bears. Each drive gets its part by its speed.
        """
        drives = self.machine.drives
        bears = [drive.endurance for drive in drives if drive.endurance is not None]
        written = self.estimate.bytes_written_per_day * self.machine.device.count
        if not written or len(bears) < len(drives):
            return None
        rates = [even_rate(drive) for drive in drives]
        return min(nbytes / (written * rate / sum(rates)) for nbytes, rate in zip(bears, rates, strict=True))

    def explain(self) -> str:
        """The plan in some lines."""
        step = self.estimate
        busy = sorted(step.busy.items(), key=lambda item: -item[1])
        moved = {link: int(nbytes) for link, nbytes in step.bytes_moved.items() if nbytes}
        tokens = f"a step of {step.tokens} tokens takes {format_seconds(step.seconds)}"
        schedule = self.kind.schedule.replace("_", " ")
        lines = [
            f"{tokens}, {step.tokens_per_second:.0f} tokens/s; bound: {step.bound}",
            f"at the least {format_seconds(self.floor_seconds)}; updates run {schedule}",
            *_listed("busy", {name: format_seconds(seconds) for name, seconds in busy if seconds}),
            *_listed("moved by a rank", {link: format_bytes(nbytes) for link, nbytes in moved.items()}),
            *(_account_line(account) for account in step.memory if account.peak_bytes),
            *(f"{name}: {value}" for name, value in self.settings.items()),
        ]
        return "\n".join([*lines, *self.reasons])


def _num_params(flat: FlatPlacement) -> int:
    return sum(slot.param.numel for slot in flat.layout.slots)


def _listed(title: str, items: Mapping[str, str]) -> list[str]:
    return [f"{title}: {', '.join(f'{name} {value}' for name, value in items.items())}"] if items else []


def _account_line(account: MemoryAccount) -> str:
    budget = f" of {format_bytes(account.budget_bytes)}" if account.is_bounded else ""
    parts = [f"{format_bytes(account.leased_bytes)} leased{budget}"]
    if account.baseline_bytes is not None:
        parts.append(f"{format_bytes(account.baseline_bytes)} of the process before")
    parts += [f"{format_bytes(most)} of activations in {phase}" for phase, most in account.activations.items() if most]
    holders = ", ".join(f"{claim.holder} {format_bytes(claim.nbytes)}" for claim in largest(account.claims, 3))
    return f"{account.tier.value} of a rank: {'; '.join(parts)}; most of it: {holders}"
