"""What a run may change between two steps, by what the machine has turned out to do. Pure.

When updates run is all that can change: homes, windows and staging slots are leased for the run, and chunks lie where
they were written first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zerooffload.config import UpdateMode
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.block_inputs import HOLDER, inputs_nbytes
from zerooffload.planner.cost import Estimate, StepKind, estimate
from zerooffload.planner.cost.demand import may_go_ahead
from zerooffload.planner.held import predicted_seconds
from zerooffload.planner.placement import Claim
from zerooffload.planner.profiles import MachineProfile, ModelProfile


@dataclass(frozen=True, kw_only=True)
class RunOnPaper:
    """A run as it is, to be predicted.

    Attributes
    ----------
    announced : AnnouncedPlan
        What it leases.
    model : ModelProfile
        Of a forward, or of one slice of it.
    machine : MachineProfile
    kind : StepKind
    """

    announced: AnnouncedPlan
    model: ModelProfile
    machine: MachineProfile
    kind: StepKind

    def estimate(self, *, baseline_bytes: int | None = None) -> Estimate:
        """What its steps take.

        Raises
        ------
        ConfigError
            If the machine's profile lacks a rate.
        """
        return estimate(self.announced, self.model, self.machine, self.kind, baseline_bytes=baseline_bytes)

    def updating(self, schedule: UpdateMode) -> RunOnPaper:
        """The same with updates at another time."""
        return replace(self, kind=replace(self.kind, schedule=schedule))

    def as_measured(self, seconds: Mapping[str, float]) -> RunOnPaper:
        """The same on a machine that takes what was measured.

        Parameters
        ----------
        seconds : Mapping[str, float]
            Of a step, by resource, as `measured_seconds` tells; a resource with nothing to do stays as it is.
        """
        shares_host = self.machine.device.shares_host_memory
        predicted = predicted_seconds(self.estimate(), computes_on_host=shares_host)
        factors = {name: seconds[name] / predicted[name] for name in predicted if predicted[name] and seconds[name]}
        if shares_host and "compute" in factors:
            # The same thread adds gradients up.
            factors["landing"] = factors["compute"]
        known = self.machine.corrections
        corrections = {**known, **{name: known.get(name, 1.0) * factor for name, factor in factors.items()}}
        return replace(self, machine=self.machine.model_copy(update={"corrections": corrections}))


def with_inputs_of_blocks(announced: AnnouncedPlan, model: ModelProfile, kind: StepKind) -> AnnouncedPlan:
    """What a run leases when the inputs of blocks have come, for which it may not have set enough aside."""
    placement = announced.placement
    nbytes_of = {work.name: work.input_nbytes * kind.num_slices for work in model.units}
    needed = inputs_nbytes(placement.block_inputs.homes, nbytes_of, placement.reach)
    aside = {claim.tier: claim.nbytes for claim in announced.claims if claim.holder == HOLDER}
    coming = [Claim(tier, HOLDER, nbytes - aside.get(tier, 0)) for tier, nbytes in needed.items()]
    return replace(announced, claims=(*announced.claims, *(claim for claim in coming if claim.nbytes > 0)))


@dataclass(frozen=True, kw_only=True)
class OtherSchedule:
    """Another time for updates, and what a step would take then, and takes now: both predicted."""

    schedule: UpdateMode
    seconds: float
    now_seconds: float


def quicker_schedule(run: RunOnPaper, schedules: Iterable[UpdateMode], *, noise_part: float) -> OtherSchedule | None:
    """The time for updates that makes steps shortest, if they get shorter by more than noise; else None.

    Parameters
    ----------
    schedules : Iterable[UpdateMode]
        Those that the run may have.
    noise_part : float
        Of a step's time, by what steps differ by chance.
    """
    now_seconds = run.estimate().seconds
    can_go_ahead = may_go_ahead(run.announced.placement)
    others = {
        schedule: run.updating(schedule).estimate().seconds
        for schedule in schedules
        if schedule is not run.kind.schedule and (can_go_ahead or schedule is not UpdateMode.DURING_BACKWARD)
    }
    if not others:
        return None
    best = min(others, key=others.__getitem__)
    if now_seconds - others[best] <= noise_part * now_seconds:
        return None
    return OtherSchedule(schedule=best, seconds=others[best], now_seconds=now_seconds)
