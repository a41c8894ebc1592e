"""A step as predicted beside the step as measured: where they differ, and what that may come from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from zerooffload.config import TierName
from zerooffload.formats import format_bytes, format_seconds
from zerooffload.planner.cost import Estimate, Lane
from zerooffload.telemetry import Link, StepReport, Work
from zerooffload.telemetry.spans import covered_seconds

LEASED_MARGIN = 0.0
"""Leases are announced before the first is taken."""
BYTES_MARGIN = 0.01
"""Bytes follow from layouts."""
HIDDEN_BYTES_MARGIN = 0.2
"""The same of a drive's where updates are hidden: how far one is when a step ends, its times say, which vary."""
JOURNAL_NBYTES = 1 << 20
"""What a step writes to the journal, which predictions leave out: it grows with chunks, not with their bytes."""
ACTIVATIONS_MARGIN = 0.1
"""Of leases and activations together: the allocator rounds, and kernels have workspaces that nobody announces."""
PROCESS_NBYTES = 16 << 20
"""What else a process grows by while it trains, whatever it trains: stacks of threads, Python's objects."""
TIME_MARGIN = 0.2
"""The worst that predictions are off by on a machine as it was calibrated: see benchmarks/plan_accuracy.py."""
SMALL_PART = 0.05
"""Of a step's time: what a resource may be off by besides, because steps would hardly show it."""

_GRADIENT_WORK = (Work.GRADIENT_ACCUMULATION.value, Work.GRADIENT_NORM.value)
_UPDATE_WORK = (Work.UPDATE_KERNEL.value, Work.CHECKSUM.value)
_UPDATE_LANES = (Lane.UPDATE,)
_DRIVE_LANES = (Lane.PARAMETER_READ, Lane.STATE_READ, Lane.WRITE)
_COMPUTE_LANES_ON_HOST = (Lane.COMPUTE, Lane.LANDING)
"""There the thread that computes also adds gradients up."""
_COPIES = (Link.COPY_IN, Link.COPY_OUT)
"""Where the device is the host they are within its memory, and are predicted as its work."""
_NAMES = {
    "compute": "compute",
    "drive": "the drive",
    "update": "the update's kernel",
    "landing": "adding gradients up",
}
_ADVICE = {
    "compute": "other programs may use the cores",
    "drive": "it may be full, throttled, or used by others",
    "update": "other programs may use the cores or the memory",
    "landing": "other programs may use the cores or the memory",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step that a run has done.

    Attributes
    ----------
    report : StepReport
    computes_on_host : bool
        Whether activations are in host memory, and the model computes in the thread that trains.
    grown_bytes : int, optional
        What the process has at most grown by since before the model was made; None where nothing predicts it.
    was_clipped : bool
        Whether clipping changed its gradients.
    hides_updates : bool
        Whether updates go on while steps end.
    """

    report: StepReport
    computes_on_host: bool
    grown_bytes: int | None = None
    was_clipped: bool = False
    hides_updates: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure.

    Attributes
    ----------
    name : str
    unit : "bytes" or "seconds"
    predicted, measured : float
    margin : float
        What they may differ by, in the unit.
    cause : str
        What it may come from, and what to do; "" within the margin.
    """

    name: str
    unit: Literal["bytes", "seconds"]
    predicted: float
    measured: float
    margin: float
    cause: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured by predicted; None if nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def is_outside(self) -> bool:
        """Whether they differ by more than the margin."""
        return abs(self.measured - self.predicted) > self.margin

    def shown(self, value: float) -> str:
        """A value in the unit, for people."""
        return format_seconds(value) if self.unit == "seconds" else format_bytes(round(value))

    def told(self) -> str:
        """A line."""
        text = f"{self.name}: {self.shown(self.measured)}, predicted {self.shown(self.predicted)}"
        return f"{text}: {self.cause}" if self.cause else text


def compared(estimate: Estimate, step: MeasuredStep) -> list[Comparison]:
    """Every figure that is both predicted and measured; what is zero in both is left out.

    Bytes and leases are those of the rank. A tier's leases are its peak so far.
    """
    found = [*_memory(estimate, step), *_moved(estimate, step), *_times(estimate, step)]
    return [comparison for comparison in found if comparison.predicted or comparison.measured]


def predicted_seconds(estimate: Estimate, *, computes_on_host: bool) -> dict[str, float]:
    """Seconds of a step in which each resource works, others beside it; resources as `measured_seconds` has them."""
    lanes = {"drive": _DRIVE_LANES, "update": _UPDATE_LANES}
    lanes |= {"compute": _COMPUTE_LANES_ON_HOST} if computes_on_host else {"landing": (Lane.LANDING,)}
    return {
        name: covered_seconds((span.begin, span.end) for span in estimate.spans if span.lane in of_resource)
        for name, of_resource in lanes.items()
    }


def measured_seconds(step: MeasuredStep) -> dict[str, float]:
    """Seconds of the step in which resources worked: those that a run measures as it goes."""
    report = step.report
    gradients = _work(report, _GRADIENT_WORK)
    found = {"drive": report.busy.get("drive", 0.0), "update": _work(report, _UPDATE_WORK)}
    found |= {"compute": report.compute_seconds + gradients} if step.computes_on_host else {"landing": gradients}
    return found


def in_words(resource: str, times: float) -> str:
    """That a resource takes so many times as long for the same, and what that may come from."""
    if times < 1:
        return f"{_NAMES[resource]} takes {times:.2f} times as long"
    return f"{_NAMES[resource]} takes {times:.1f} times as long: {_ADVICE[resource]}"


def _work(report: StepReport, kinds: tuple[str, ...]) -> float:
    return sum(seconds.get(kind, 0.0) for seconds in (report.work, report.hidden_work) for kind in kinds)


def _memory(estimate: Estimate, step: MeasuredStep) -> Iterator[Comparison]:
    usages = {usage.name: usage for usage in step.report.tiers}
    for account in estimate.memory:
        peak = usages[account.tier.value].peak_bytes
        yield _with_cause(
            Comparison(
                name=f"{account.tier.value}, leased",
                unit="bytes",
                predicted=account.leased_bytes,
                measured=peak,
                margin=LEASED_MARGIN * account.leased_bytes,
            ),
            "the run leases otherwise than it was planned: its budgets or settings are not those of the plan",
        )
        if account.tier is TierName.HOST and step.grown_bytes is not None:
            expected = account.leased_bytes + max(account.activations.values(), default=0)
            yield _with_cause(
                Comparison(
                    name="host, leased and activations",
                    unit="bytes",
                    predicted=expected,
                    measured=step.grown_bytes,
                    margin=ACTIVATIONS_MARGIN * expected + PROCESS_NBYTES,
                ),
                "memory that is not leased: what else the loop keeps, or kernels that take more than they announce",
            )


def _moved(estimate: Estimate, step: MeasuredStep) -> Iterator[Comparison]:
    for link, predicted in estimate.bytes_moved.items():
        if step.computes_on_host and link in _COPIES:
            continue
        measured = step.report.bytes_moved.get(link, 0)
        yield _with_cause(
            Comparison(
                name=link.replace("_", " "),
                unit="bytes",
                predicted=predicted,
                measured=measured,
                margin=_bytes_margin(link, step) * predicted + (JOURNAL_NBYTES if link == Link.NVME_WRITTEN else 0),
            ),
            _why_moved(predicted, measured, step),
        )


def _why_moved(predicted: float, measured: float, step: MeasuredStep) -> str:
    if measured < predicted:
        return "some states did not have to move"
    if step.was_clipped:
        return "clipping changed gradients whose updates had begun, and those were done again"
    return "something beside training moved bytes in the step: an evaluation, a save, an edit"


def _bytes_margin(link: str, step: MeasuredStep) -> float:
    of_drive = link in (Link.NVME_READ, Link.NVME_WRITTEN)
    return HIDDEN_BYTES_MARGIN if of_drive and step.hides_updates else BYTES_MARGIN


def _times(estimate: Estimate, step: MeasuredStep) -> Iterator[Comparison]:
    predicted = predicted_seconds(estimate, computes_on_host=step.computes_on_host)
    measured = measured_seconds(step)
    whole = Comparison(
        name="step",
        unit="seconds",
        predicted=estimate.seconds,
        measured=step.report.seconds,
        margin=TIME_MARGIN * estimate.seconds,
    )
    yield _with_cause(whole, _why_whole(whole, predicted, measured, step.report))
    for name, seconds in predicted.items():
        comparison = Comparison(
            name=f"{name}, busy",
            unit="seconds",
            predicted=seconds,
            measured=measured[name],
            margin=TIME_MARGIN * seconds + SMALL_PART * estimate.seconds,
        )
        yield _with_cause(comparison, _why(name, predicted, measured))


def _why(name: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    if not predicted[name]:
        return "nothing was planned for it"
    why = in_words(name, measured[name] / predicted[name])
    return f"{why}; or the machine's profile is wrong: zerooffload calibrate makes it again"


def _why_whole(
    whole: Comparison, predicted: Mapping[str, float], measured: Mapping[str, float], report: StepReport
) -> str:
    """The resource that accounts for most of it, or the longest wait."""
    sign = 1 if whole.measured > whole.predicted else -1
    name = max(predicted, key=lambda name: sign * (measured[name] - predicted[name]))
    if 2 * abs(measured[name] - predicted[name]) >= abs(whole.measured - whole.predicted):
        return f"most of it is {_NAMES[name]}"
    waits = sorted(report.waits.items(), key=lambda item: -item[1])
    longest = f"; it waited longest for {waits[0][0]}, {format_seconds(waits[0][1])}" if waits else ""
    return f"no resource alone accounts for it{longest}"


def _with_cause(comparison: Comparison, cause: str) -> Comparison:
    return replace(comparison, cause=cause) if comparison.is_outside else comparison
