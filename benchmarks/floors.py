"""The least time that a training step can take, from what it asks of each resource. Pure.

The page `zerooffload/docs/overlap.md` has the formulas in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from functools import reduce
from operator import add

from zerooffload.config import UpdateMode

FP32_BYTES = 4
MOMENTS_BYTES = 8
"""A parameter's, in the optimizer state of AdamW."""
KERNEL_BYTES = 28
"""Of memory traffic for each parameter updated: 16 read, 12 written."""
_EIGHTHS = 8


class Tier(StrEnum):
    """Where a state has its home."""

    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a part of a step asks of each resource.

    Attributes
    ----------
    host_traffic_bytes : float
        Read from and written to host memory by the CPU and by copies: drives not counted.
    """

    compute_seconds: float = 0.0
    disk_read_bytes: float = 0.0
    disk_written_bytes: float = 0.0
    copied_in_bytes: float = 0.0
    copied_out_bytes: float = 0.0
    num_updated: float = 0.0
    host_traffic_bytes: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        names = self.__dataclass_fields__
        return Demand(**{name: a + b for name, a, b in zip(names, astuple(self), astuple(other), strict=True)})


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How fast each resource is alone.

    Attributes
    ----------
    disk : callable
        Bytes a second, read and written together, at a ratio of reads to writes; see `mix_of`.
    copy, host_traffic : float
        Bytes a second, of one direction, and of host memory.
    kernel : float
        Parameters a second that the update's kernel takes through arrays in memory.
    """

    disk: Callable[[tuple[int, int]], float]
    copy: float
    host_traffic: float
    kernel: float

    def seconds(self, demand: Demand) -> dict[str, float]:
        """How long each resource is busy."""
        moved = demand.disk_read_bytes + demand.disk_written_bytes
        return {
            "compute": demand.compute_seconds,
            "disk": moved / self.disk(mix_of(demand)) if moved else 0.0,
            "copy in": demand.copied_in_bytes / self.copy,
            "copy out": demand.copied_out_bytes / self.copy,
            "kernel": demand.num_updated / self.kernel,
            "host memory": demand.host_traffic_bytes / self.host_traffic,
        }


def mix_of(demand: Demand) -> tuple[int, int]:
    """Of 8 transfers, how many read and how many write, in lowest terms; both directions of a mix take part."""
    read, written = demand.disk_read_bytes, demand.disk_written_bytes
    if not read or not written:
        return int(read > 0), int(written > 0)
    reads = min(_EIGHTHS - 1, max(1, round(_EIGHTHS * read / (read + written))))
    common = math.gcd(reads, _EIGHTHS)
    return reads // common, (_EIGHTHS - reads) // common


@dataclass(frozen=True, kw_only=True)
class StepDemand:
    """A step's passes in their order, and its update."""

    forwards: Sequence[Demand]
    backwards: Sequence[Demand]
    update: Demand

    @property
    def total(self) -> Demand:
        """All of it."""
        return reduce(add, (*self.forwards, *self.backwards, self.update))

    def sections(self, schedule: UpdateMode) -> list[Demand]:
        """Parts of the step of which one cannot run beside another: within each, everything may overlap.

        The update belongs to the step before, or to this one: over many steps that is the same.
        """
        match schedule:
            case UpdateMode.AFTER_BACKWARD:
                window, others = [], [*self.forwards, *self.backwards]
            case UpdateMode.UNDER_NEXT_FORWARD:
                window, others = [self.forwards[0]], [*self.forwards[1:], *self.backwards]
            case UpdateMode.DURING_BACKWARD:
                window = [self.forwards[0], self.backwards[-1]]
                others = [*self.forwards[1:], *self.backwards[:-1]]
        parts = [reduce(add, [*window, self.update])]
        return [*parts, reduce(add, others)] if others else parts


def floor_seconds(step: StepDemand, schedule: UpdateMode, speeds: Speeds) -> float:
    """The sum over sections of the time of the resource that is busy longest."""
    return sum(max(speeds.seconds(section).values()) for section in step.sections(schedule))


def sum_seconds(step: StepDemand, speeds: Speeds) -> float:
    """What the step would take if nothing overlapped: what is counted in `host memory` is in the others too."""
    seconds = speeds.seconds(step.total)
    return sum(value for name, value in seconds.items() if name != "host memory")


def slowest_link(step: StepDemand, speeds: Speeds) -> tuple[str, float]:
    """The resource other than compute that a step keeps busy longest, and for how long."""
    seconds = {name: value for name, value in speeds.seconds(step.total).items() if name != "compute"}
    name = max(seconds, key=seconds.__getitem__)
    return name, seconds[name]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step of AdamW on fp32 parameters in equal units.

    Attributes
    ----------
    num_kept_units : int
        Units that the window of parameters in use holds: at the turn from a pass to the next they need not come again.
        All of them where the device computes on the homes.
    num_cached : int
        Parameters whose records the staging ring still holds when the next forward needs them, and when they are
        updated again: those are not read.
    accumulation : int
        Backwards before each update.
    computes_again : bool
        Whether each backward computes its forward again.
    copies : bool
        Whether the device has memory of its own.
    copy_passes : int
        Passes over host memory of a copy: one of a GPU's, two where the device's memory is the host's, and none where
        a copy only takes time.
    commits : bool
        Whether the update takes a checksum of what it writes.
    compute_seconds : float
        Of all passes; gradients take twice as long as a forward.
    """

    num_params: int
    num_units: int
    num_kept_units: int
    params: Tier
    optimizer: Tier
    gradients: Tier
    num_cached: int = 0
    accumulation: int = 1
    computes_again: bool = False
    copies: bool = True
    copy_passes: int = 1
    commits: bool = False
    compute_seconds: float = 0.0


def step_demand(work: Workload) -> StepDemand:
    """What a step asks of each resource, by the formula of the docs."""
    forward_seconds = work.compute_seconds / work.accumulation / (4 if work.computes_again else 3)
    backward_seconds = work.compute_seconds / work.accumulation - forward_seconds
    whole = FP32_BYTES * work.num_params
    kept = min(work.num_kept_units, work.num_units) / work.num_units
    forwards, backwards = [], []
    for number in range(work.accumulation):
        # What the window held was given up for the update.
        is_first = number == 0 and not _stays(work)
        coming = _parameters(work, whole if is_first else whole * (1 - kept), num_held=is_first * work.num_cached)
        forwards.append(coming + Demand(compute_seconds=forward_seconds))
        coming = _parameters(work, whole * (1 - kept)) + _gradients(work, is_first=number == 0)
        backwards.append(coming + Demand(compute_seconds=backward_seconds))
    return StepDemand(forwards=forwards, backwards=backwards, update=_update(work))


def _stays(work: Workload) -> bool:
    return work.params is Tier.HOST and not work.copies


def _parameters(work: Workload, nbytes: float, *, num_held: int = 0) -> Demand:
    """Those that the update has left in memory need not be read."""
    if _stays(work):
        return Demand()
    is_far = work.params is Tier.NVME
    return Demand(
        disk_read_bytes=nbytes - FP32_BYTES * num_held if is_far else 0.0,
        copied_in_bytes=nbytes if work.copies else 0.0,
        host_traffic_bytes=work.copy_passes * nbytes if work.copies else 0.0,
    )


def _gradients(work: Workload, *, is_first: bool) -> Demand:
    """Copied out, then joined with their home: one pass that reads what came, and reads and writes what is held.

    What comes first needs no joining: beside a device it comes straight home, and is read for the norm.
    """
    nbytes = FP32_BYTES * work.num_params
    is_far = work.gradients is Tier.NVME
    traffic = work.copy_passes * nbytes if work.copies else 0
    if not is_first:
        traffic += 3 * nbytes
    else:
        traffic += nbytes if is_far or work.copies else 2 * nbytes
    return Demand(
        disk_read_bytes=nbytes if is_far and not is_first else 0.0,
        disk_written_bytes=nbytes if is_far else 0.0,
        copied_out_bytes=nbytes if work.copies else 0.0,
        host_traffic_bytes=traffic,
    )


def _update(work: Workload) -> Demand:
    num = work.num_params
    state_bytes = FP32_BYTES * (work.params is Tier.NVME) + MOMENTS_BYTES * (work.optimizer is Tier.NVME)
    gradient_bytes = FP32_BYTES * (work.gradients is Tier.NVME)
    return Demand(
        disk_read_bytes=state_bytes * (num - work.num_cached) + gradient_bytes * num,
        disk_written_bytes=state_bytes * num,
        num_updated=num,
        host_traffic_bytes=KERNEL_BYTES * num + (state_bytes * num if work.commits else 0),
    )


def expected_bytes(step: StepDemand) -> Mapping[str, float]:
    """What `zo.step_report(model).bytes_moved` is to say."""
    total = step.total
    return {
        "nvme_read": total.disk_read_bytes,
        "nvme_written": total.disk_written_bytes,
        "copy_in": total.copied_in_bytes,
        "copy_out": total.copied_out_bytes,
    }
