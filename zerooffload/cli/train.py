"""`zerooffload train` and `zerooffload resume`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from zerooffload.errors import ConfigError
from zerooffload.telemetry import LastStep, Listener, TraceFile
from zerooffload.train import (
    Recipe,
    TrainingResult,
    checkpoint_in,
    is_page,
    read_recipe,
    recorded_recipe,
    train,
    write_report,
)
from zerooffload.train.plan_keeper import PlanKeeper
from zerooffload.train.planning import planned
from zerooffload.train.progress import ProgressBar
from zerooffload.train.ranks import is_first_rank, this_rank
from zerooffload.train.summary import print_summary


@dataclass(frozen=True)
class Outputs:
    """What is shown and written of a run.

    Attributes
    ----------
    report : pathlib.Path, optional
        A page if its name ends in .html, a JSON file otherwise.
    trace : pathlib.Path, optional
        A timeline for ui.perfetto.dev; other ranks write theirs beside it.
    trace_steps : int
        How many of the first steps it shows.
    drive_endurance_tbw : float, optional
        What the drives of a rank's nvme paths bear together, in 10^12 bytes written.
    """

    report: Path | None = None
    trace: Path | None = None
    trace_steps: int = 5
    drive_endurance_tbw: float | None = None


def train_by_recipe(path: Path, overrides: list[str], outputs: Outputs) -> TrainingResult:
    """Train, show it, write the report.

    Raises
    ------
    ZeroOffloadError
        If a setting, the model, the data or a tier does not work.
    """
    return _run(planned(read_recipe(path, overrides)), outputs, resume=False)


def resume_in(path: Path, overrides: list[str], outputs: Outputs) -> TrainingResult:
    """Go on with the run in an nvme path or from a checkpoint, show it, write the report.

    Raises
    ------
    ZeroOffloadError
        If a setting, the model, the data or a tier does not work.
    """
    return _run(recorded_recipe(path, overrides), outputs, resume=True, checkpoint=checkpoint_in(path))


def _run(recipe: Recipe, outputs: Outputs, *, resume: bool, checkpoint: Path | None = None) -> TrainingResult:
    for what, path in (("report", outputs.report), ("trace", outputs.trace)):
        if path is not None and not path.absolute().parent.is_dir():
            # Found before training, not after it.
            raise ConfigError(f"cannot write the {what} {path}: {path.absolute().parent} is not a folder")
    with _trace_file(outputs) as traces:
        if not is_first_rank():
            return train(recipe, resume=resume, checkpoint=checkpoint, listeners=traces)
        return _run_as_first(recipe, outputs, traces, resume=resume, checkpoint=checkpoint)


def _run_as_first(
    recipe: Recipe, outputs: Outputs, traces: list[TraceFile], *, resume: bool, checkpoint: Path | None
) -> TrainingResult:
    report, last_step = outputs.report, LastStep()
    follows_steps = report is not None and is_page(report)
    console = Console()
    with ProgressBar(console) as bar:
        listeners: list[Listener] = [*traces, *([last_step] if follows_steps else [])]
        result = train(recipe, bar, resume=resume, checkpoint=checkpoint, listeners=listeners, keeper=PlanKeeper())
    print_summary(console, result, endurance_tbw=outputs.drive_endurance_tbw)
    if report is not None:
        write_report(report, result, last_step.picture())
        console.print(f"report written to {report}", highlight=False)
    for trace in traces:
        console.print(f"trace written to {trace.path}: open it in ui.perfetto.dev", highlight=False)
    return result


@contextmanager
def _trace_file(outputs: Outputs) -> Iterator[list[TraceFile]]:
    """The one that this rank writes, if one is wanted."""
    if outputs.trace is None:
        yield []
        return
    with TraceFile(outputs.trace, rank=this_rank(), steps=outputs.trace_steps) as file:
        yield [file]
