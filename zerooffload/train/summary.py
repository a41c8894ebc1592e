"""The tables at the end of a run: memory as planned and as it was, and where the time of a step went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table

from zerooffload.formats import format_bytes, format_seconds
from zerooffload.telemetry import StepReport, TierUsage
from zerooffload.train.keeper import HeldRun
from zerooffload.train.loop import StepRecord, TrainingResult


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """The process's memory in three lines, and what it came to.

    Attributes
    ----------
    leased_bytes : int
        The peak of what we leased in host memory.
    activations_bytes : int, optional
        Predicted; None if nothing could be predicted, 0 where they are not in host memory.
    """

    baseline_bytes: int
    leased_bytes: int
    activations_bytes: int | None
    process_peak_bytes: int

    @property
    def growth_bytes(self) -> int:
        """What the process really grew by."""
        return self.process_peak_bytes - self.baseline_bytes

    @property
    def expected_growth_bytes(self) -> int:
        """What the account says that it should grow by."""
        return self.leased_bytes + (self.activations_bytes or 0)


def memory_account(result: TrainingResult) -> MemoryAccount:
    """The account of a run that finished a step."""
    tiers = {tier.name: tier for tier in result.steps[-1].report.tiers}
    return MemoryAccount(
        baseline_bytes=result.baseline_bytes,
        leased_bytes=tiers["host"].peak_bytes,
        activations_bytes=_host_activations(result),
        process_peak_bytes=result.process_peak_bytes,
    )


def _host_activations(result: TrainingResult) -> int | None:
    if result.activations is None:
        return None
    return result.activations.peak_bytes if result.computes_on_host else 0


def seconds_by_cause(steps: Iterable[StepRecord]) -> dict[str, float]:
    """Seconds of all steps together, by cause: waits, our work, and the rest as "compute"."""
    totals = {"compute": 0.0}
    for record in steps:
        for cause, seconds in (*record.report.waits.items(), *record.report.work.items()):
            totals[cause] = totals.get(cause, 0.0) + seconds
        totals["compute"] += record.report.compute_seconds
    return totals


def settled_steps(steps: list[StepRecord]) -> list[StepRecord]:
    """Steps whose report covers nothing but themselves: the first one's begins when the model was offloaded."""
    return steps[1:] or steps


@dataclass(frozen=True, kw_only=True)
class Wear:
    """What a run writes to the drives.

    Attributes
    ----------
    bytes_per_step : float
    days : float, optional
        How long drives of the given endurance bear that, if training never stops; None if nothing is written.
    """

    bytes_per_step: float
    days: float | None


def wear(steps: Sequence[StepRecord], endurance_tbw: float) -> Wear:
    """The wear of drives that bear `endurance_tbw` times 10^12 bytes together."""
    written = sum(record.report.bytes_moved.get("nvme_written", 0) for record in steps)
    seconds = sum(record.report.seconds for record in steps)
    days = endurance_tbw * 1e12 / (written / seconds) / 86_400 if written else None
    return Wear(bytes_per_step=written / len(steps), days=days)


def print_summary(console: Console, result: TrainingResult, *, endurance_tbw: float | None = None) -> None:
    """Tables of a run that finished a step."""
    steps = settled_steps(result.steps)
    console.print(
        Group(
            _tier_table(result.steps[-1].report.tiers),
            _account_table(memory_account(result)),
            _time_table(steps),
        )
    )
    if result.held is not None and result.held.comparisons:
        console.print(_prediction_table(result.held))
    if endurance_tbw is not None:
        console.print(_wear_line(wear(steps, endurance_tbw), endurance_tbw), highlight=False)


def _wear_line(found: Wear, endurance_tbw: float) -> str:
    written = f"{format_bytes(int(found.bytes_per_step))} written to nvme a step"
    if found.days is None:
        return written
    return f"{written}: drives of {endurance_tbw:g} TBW last {found.days:,.0f} days of training without a pause"


def _tier_table(tiers: Iterable[TierUsage]) -> Table:
    table = Table(title="Tiers", title_justify="left")
    table.add_column("tier")
    for heading in ("budget", "predicted peak", "real peak"):
        table.add_column(heading, justify="right")
    for tier in tiers:
        values = (tier.budget_bytes, tier.planned_bytes, tier.peak_bytes)
        table.add_row(tier.name, *(format_bytes(value) for value in values))
    return table


def _account_table(account: MemoryAccount) -> Table:
    table = Table(title="Memory of the process", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("baseline (interpreter, torch, libraries)", format_bytes(account.baseline_bytes))
    table.add_row("leased by the tiers in host memory", format_bytes(account.leased_bytes))
    predicted = account.activations_bytes
    table.add_row("activations, predicted", "not predictable" if predicted is None else format_bytes(predicted))
    table.add_section()
    table.add_row("sum", format_bytes(account.baseline_bytes + account.expected_growth_bytes))
    off = account.growth_bytes / account.expected_growth_bytes - 1 if account.expected_growth_bytes else 0.0
    table.add_row(f"real peak (grew {off:+.1%} against the prediction)", format_bytes(account.process_peak_bytes))
    return table


def _time_table(steps: list[StepRecord]) -> Table:
    table = Table(title=f"A step's time (mean of {len(steps)})", title_justify="left")
    table.add_column("cause")
    table.add_column("seconds", justify="right")
    table.add_column("part", justify="right")
    reports = [record.report for record in steps]
    whole = sum(report.seconds for report in reports) / len(steps)
    for kind, cause, seconds in sorted(_causes(reports), key=lambda row: -row[2]):
        mean = seconds / len(steps)
        table.add_row(f"{kind}{cause}", format_seconds(mean), f"{mean / whole:.1%}" if whole else "")
    table.add_section()
    table.add_row("step", format_seconds(whole), "")
    return table


def _prediction_table(held: HeldRun) -> Table:
    table = Table(title=f"Step {held.probe_step} beside its prediction", title_justify="left")
    table.add_column("")
    for heading in ("predicted", "measured", "ratio"):
        table.add_column(heading, justify="right")
    for each in held.comparisons:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        style = "yellow" if each.is_outside else None
        table.add_row(each.name, each.shown(each.predicted), each.shown(each.measured), ratio, style=style)
    return table


def _causes(reports: list[StepReport]) -> Iterator[tuple[str, str, float]]:
    yield "", "compute (model, forward and backward)", sum(report.compute_seconds for report in reports)
    for kind, maps in (("wait: ", [r.waits for r in reports]), ("", [r.work for r in reports])):
        for cause in dict.fromkeys(cause for entries in maps for cause in entries):
            yield kind, cause, sum(entries.get(cause, 0.0) for entries in maps)
