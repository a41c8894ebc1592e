"""`zerooffload train`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from zerooffload.errors import ConfigError
from zerooffload.train import TrainingResult, read_recipe, train, write_report
from zerooffload.train.progress import ProgressBar
from zerooffload.train.ranks import is_first_rank
from zerooffload.train.summary import print_summary


def train_by_recipe(path: Path, overrides: list[str], report: Path | None) -> TrainingResult:
    """Train, show it, write the report.

    Raises
    ------
    ZeroOffloadError
        If a setting, the model, the data or a tier does not work.
    """
    recipe = read_recipe(path, overrides)
    if report is not None and not report.absolute().parent.is_dir():
        # Found before training, not after it.
        raise ConfigError(f"cannot write the report {report}: {report.absolute().parent} is not a folder")
    if not is_first_rank():
        return train(recipe)
    console = Console()
    with ProgressBar(console) as bar:
        result = train(recipe, bar)
    print_summary(console, result)
    if report is not None:
        write_report(report, result)
        console.print(f"report written to {report}", highlight=False)
    return result
