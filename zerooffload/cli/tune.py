"""`zerooffload tune`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from zerooffload.calibration import machine_file, remembered_machine
from zerooffload.errors import ConfigError
from zerooffload.formats import format_seconds
from zerooffload.machine import write_whole
from zerooffload.planner.profiles import read_machine, write_machine
from zerooffload.train.planning import recipe_subject
from zerooffload.train.recipe import override, read_values
from zerooffload.train.tuning.configurations import Configuration
from zerooffload.train.tuning.journal import Turn
from zerooffload.train.tuning.tune import Effort, Observer, Tried, Tuned, Tuning, of_one_rank, tuned_recipe


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where what was found goes.

    Attributes
    ----------
    recipe : pathlib.Path, optional
        Default: beside the given one, "NAME.tuned.toml".
    as_json : bool
        Print one JSON object.
    """

    recipe: Path | None = None
    as_json: bool = False


def tune_recipe(
    path: Path,
    settings: Sequence[str],
    machine: Path | None,
    effort: Effort,
    outputs: Outputs,
    *,
    may_use_moments: bool,
) -> None:
    """Tune, show what was tried, write the best recipe and what was learned of the machine.

    Raises
    ------
    ZeroOffloadError
        If a setting, the model, the data or a tier does not work.
    KeyboardInterrupt
        If it was interrupted; the best so far is written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("tune tries runs of one rank: start it without torchrun")
    output = outputs.recipe or path.with_suffix(".tuned.toml")
    _check_output(output, path)
    profile_file = _profile_file(machine)
    recipe, profile = recipe_subject(path, settings, None if machine is None else str(machine)).resolved()
    values = read_values(path)
    for setting in settings:
        override(values, setting)
    journal = output.with_name(f"{output.name}.trials.json")
    tuning = Tuning(recipe, of_one_rank(profile), journal, effort, may_use_moments=may_use_moments)
    with _Bar(Console(stderr=True)) as bar:
        tuned = tuning.tune(bar)
    try:
        write_whole(output, tuned_recipe(values, tuned.best))
    except OSError as error:
        raise ConfigError(f"cannot write the best recipe to {output}: {error.strerror}") from error
    if tuned.corrections != profile.corrections:
        known = read_machine(machine or machine_file())
        write_machine(profile_file, known.model_copy(update={"corrections": dict(tuned.corrections)}))
    if outputs.as_json:
        print(json.dumps(_document(tuned, output), indent=1, allow_nan=False))
    else:
        _show(Console(), tuned, output, profile_file)
    if not tuned.is_complete:
        Console(stderr=True).print(f"the trials so far are in {journal}: the same command goes on", highlight=False)
        raise KeyboardInterrupt


def _check_output(output: Path, recipe: Path) -> None:
    """Found before trying, not after it."""
    if output.suffix != ".toml" or not output.absolute().parent.is_dir():
        raise ConfigError(f"cannot write the best recipe to {output}: name a file that ends in .toml, in a folder")
    if output.absolute() == recipe.absolute():
        raise ConfigError(f"--output {output} is the recipe itself: name another file")


def _profile_file(machine: Path | None) -> Path:
    """Where what is learned of the machine goes: its profile, which if it was written as TOML stays as it is."""
    if machine is not None:
        read_machine(machine)
    remembered = remembered_machine(machine)
    if remembered is not None and remembered.foreign:
        raise ConfigError(remembered.foreign)
    return (machine or machine_file()).with_suffix(".json")


class _Bar(Observer):
    """The tuning on a terminal: turns, and what is tried; elsewhere nothing."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("", total=None)
        self._first: Configuration | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """Show it."""
        self._bar.update(self._task, description=what)

    def begins(self, num_turns: int, num_found: int) -> None:
        """How many there are to do."""
        self._bar.update(self._task, total=num_turns)
        if num_found:
            self.doing(f"going on behind {num_found} trials")

    def tries(self, one: Configuration) -> None:
        """Show its settings."""
        self._first = self._first or one
        self.doing(_words(one.changes(self._first)))

    def tried(self, one: Configuration, turn: Turn) -> None:  # noqa: ARG002 - the table tells
        """Move on."""
        self._bar.advance(self._task)


def _words(changes: Mapping[str, Any]) -> str:
    """Changed settings, short."""
    return ", ".join(f"{name} = {_short(value)}" for name, value in changes.items()) or "as the recipe has it"


def _short(value: Any) -> str:
    return "by unit" if isinstance(value, dict) and len(value) > 1 else str(value)


def _show(console: Console, tuned: Tuned, output: Path, profile_file: Path) -> None:
    table = Table("configuration", box=None, padding=(0, 2), title="Tried", title_justify="left")
    for heading in ("predicted", "measured", "of the recipe's"):
        table.add_column(heading, justify="right")
    for one in tuned.tried:
        predicted = format_seconds(one.configuration.plan.estimate.seconds)
        measured = ("did not run", "") if one.seconds is None else (format_seconds(one.seconds), f"{one.part:.0%}")
        style = "bold" if one.configuration is tuned.best else None
        table.add_row(_words(one.configuration.changes(tuned.first)), predicted, *measured, style=style)
    console.print(table)
    console.print(f"{_verdict(tuned)}; written to {output}", highlight=False)
    if tuned.corrections:
        factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in tuned.corrections.items())
        console.print(f"learned of this machine: {factors}; in {profile_file}", highlight=False)


def _verdict(tuned: Tuned) -> str:
    if tuned.best is tuned.first:
        return "nothing was faster than the recipe's own settings"
    part = next(one.part for one in tuned.tried if one.configuration is tuned.best)
    return f"the fastest takes {part:.0%} of the time of the recipe's own settings"


def _document(tuned: Tuned, output: Path) -> dict[str, Any]:
    return {
        "recipe": str(output),
        "is_complete": tuned.is_complete,
        "best": _row(next(one for one in tuned.tried if one.configuration is tuned.best), tuned),
        "tried": [_row(one, tuned) for one in tuned.tried],
        "corrections": dict(tuned.corrections),
    }


def _row(one: Tried, tuned: Tuned) -> dict[str, Any]:
    return {
        "settings": one.configuration.settings,
        "changes": one.configuration.changes(tuned.first),
        "predicted_seconds": one.configuration.plan.estimate.seconds,
        "seconds": one.seconds,
        "part_of_the_recipes": None if one.seconds is None else one.part,
        "refusal": one.refusal,
    }
