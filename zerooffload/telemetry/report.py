"""What one step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TierUsage:
    """Bytes of ours on one tier. On a CPU the device tier aliases host memory: its bytes count inside the host's.

    Attributes
    ----------
    budget_bytes : int
        The most that may be leased.
    planned_bytes : int
        What the plan announced before training.
    leased_bytes, peak_bytes : int
        Leased now, and at most so far.
    """

    name: str
    budget_bytes: int
    planned_bytes: int
    leased_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The last finished `optimizer.step()`, counted from the end of the one before.

    Attributes
    ----------
    step : int
        1 for the first.
    seconds : float
        Wall time.
    bytes_moved : Mapping[str, int]
        Bytes by link: "nvme_read", "nvme_written", "copy_in", "copy_out", "gathered", "reduced".
    waits, work : Mapping[str, float]
        Seconds in which the training thread stood waiting, by cause, and did work of ours, by kind, without the waits
        and other work inside it. The rest of `seconds` is the model's own compute and the user's loop.
    hidden_work : Mapping[str, float]
        Seconds of work of ours on threads beside the training thread, by kind.
    busy : Mapping[str, float]
        Seconds in which reads ("nvme_read") and writes ("nvme_written") were under way, and "drive": either of them. A
        transfer counts in the step in which it is first known to be over.
    tiers : tuple[TierUsage, ...]
        device, host and nvme.
    baseline_bytes, process_peak_bytes : int
        Resident memory of the process before `offload`, and its peak (VmHWM) so far.
    committed_step : int or None
        The newest step that a crash would not have cost when this one ended; None where steps are not committed.
    """

    step: int
    seconds: float
    bytes_moved: Mapping[str, int]
    waits: Mapping[str, float]
    work: Mapping[str, float]
    hidden_work: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    tiers: tuple[TierUsage, ...]
    baseline_bytes: int
    process_peak_bytes: int
    committed_step: int | None = None

    @property
    def compute_seconds(self) -> float:
        """What is left of the step without our waits and work."""
        return self.seconds - sum(self.waits.values()) - sum(self.work.values())
