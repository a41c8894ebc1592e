"""A plan on a machine: what its steps take, move and hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.cost.memory import MemoryAccount, memory_accounts
from zerooffload.planner.cost.speeds import Speeds, speeds_of
from zerooffload.planner.cost.step import Span, StepKind, simulate_step
from zerooffload.planner.cost.task_list import Lane
from zerooffload.planner.profiles import MachineProfile, ModelProfile

_DRIVE_LANES = (Lane.PARAMETER_READ, Lane.STATE_READ, Lane.WRITE)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a rank's step is predicted to be.

    Attributes
    ----------
    seconds : float
    busy : Mapping[str, float]
        Seconds that each resource works, were it alone: "compute", "copy in", "copy out", "link", "drive", "update",
        "landing".
    bytes_moved : Mapping[str, float]
        By link, as `StepReport.bytes_moved`.
    tokens : int
        Of a step, of all ranks of the machine.
    memory : tuple[MemoryAccount, ...]
        device, host, nvme.
    spans : Sequence[Span]
        What each lane does when.
    """

    seconds: float
    busy: Mapping[str, float]
    bytes_moved: Mapping[str, float]
    tokens: int
    memory: tuple[MemoryAccount, ...]
    spans: Sequence[Span]

    @property
    def bound(self) -> str:
        """The resource that works longest."""
        return max(self.busy, key=self.busy.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks of the machine."""
        return self.tokens / self.seconds

    @property
    def bytes_written_per_day(self) -> float:
        """To nvme by this rank, if it trains all day."""
        return self.bytes_moved["nvme_written"] / self.seconds * 86400


def estimate(
    plan: AnnouncedPlan,
    model: ModelProfile,
    machine: MachineProfile,
    kind: StepKind,
    *,
    baseline_bytes: int | None = None,
) -> Estimate:
    """What steps of a plan take on a machine.

    Parameters
    ----------
    plan : AnnouncedPlan
        Of one of the machine's ranks.
    model : ModelProfile
        Of a forward of that rank; of one slice where blocks run in slices.
    baseline_bytes : int, optional
        Host memory of the process before the run.

    Raises
    ------
    ConfigError
        If the machine's profile lacks a rate.
    """
    speeds = speeds_of(machine)
    step = simulate_step(plan, model, speeds, kind)
    return Estimate(
        seconds=step.seconds,
        busy=_busy(step.busy, speeds),
        bytes_moved=step.moved.moved(),
        tokens=model.num_tokens * kind.num_slices * kind.accumulation * machine.device.count,
        memory=memory_accounts(plan, model, kind, baseline_bytes=baseline_bytes),
        spans=step.spans,
    )


def _busy(lanes: Mapping[Lane, float], speeds: Speeds) -> dict[str, float]:
    reads = lanes[Lane.PARAMETER_READ] + lanes[Lane.STATE_READ]
    together = 2 * min(reads, lanes[Lane.WRITE])
    others = {str(lane): seconds for lane, seconds in lanes.items() if lane not in _DRIVE_LANES}
    return {**others, "drive": reads + lanes[Lane.WRITE] - together + together / speeds.drive_mix}
