"""`zerooffload train` and `zerooffload resume`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from zerooffload.errors import ConfigError
from zerooffload.train import Recipe, TrainingResult, read_recipe, recorded_recipe, train, write_report
from zerooffload.train.progress import ProgressBar
from zerooffload.train.ranks import is_first_rank
from zerooffload.train.summary import print_summary


@dataclass(frozen=True)
class Outputs:
    """What is shown and written of a run.

    Attributes
    ----------
    report : pathlib.Path, optional
        A JSON file.
    drive_endurance_tbw : float, optional
        What the drives of a rank's nvme paths bear together, in 10^12 bytes written.
    """

    report: Path | None = None
    drive_endurance_tbw: float | None = None


def train_by_recipe(path: Path, overrides: list[str], outputs: Outputs) -> TrainingResult:
    """Train, show it, write the report.

    Raises
    ------
    ZeroOffloadError
        If a setting, the model, the data or a tier does not work.
    """
    return _run(read_recipe(path, overrides), outputs, resume=False)


def resume_in(path: Path, overrides: list[str], outputs: Outputs) -> TrainingResult:
    """Go on with the run in an nvme path, show it, write the report.

    Raises
    ------
    ZeroOffloadError
        If a setting, the model, the data or a tier does not work.
    """
    return _run(recorded_recipe(path, overrides), outputs, resume=True)


def _run(recipe: Recipe, outputs: Outputs, *, resume: bool) -> TrainingResult:
    report = outputs.report
    if report is not None and not report.absolute().parent.is_dir():
        # Found before training, not after it.
        raise ConfigError(f"cannot write the report {report}: {report.absolute().parent} is not a folder")
    if not is_first_rank():
        return train(recipe, resume=resume)
    console = Console()
    with ProgressBar(console) as bar:
        result = train(recipe, bar, resume=resume)
    print_summary(console, result, endurance_tbw=outputs.drive_endurance_tbw)
    if report is not None:
        write_report(report, result)
        console.print(f"report written to {report}", highlight=False)
    return result
