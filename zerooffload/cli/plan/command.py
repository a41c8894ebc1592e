"""`zerooffload plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from zerooffload.cli.plan.compare import Answer, answer, show_comparison
from zerooffload.cli.plan.document import document
from zerooffload.cli.plan.page import plan_page
from zerooffload.cli.plan.show import show_plan, show_zero_table
from zerooffload.errors import BudgetError, ConfigError
from zerooffload.planner.stages import stage_table
from zerooffload.planner.units import optimizer_states
from zerooffload.train.planning import Planner, Subject, model_subject, recipe_subject
from zerooffload.train.process import resident_bytes_trimmed

AS_ASKED = "as asked"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What is shown and written of a plan.

    Attributes
    ----------
    as_json : bool
    html : pathlib.Path, optional
        The page's file.
    what_if : Sequence[str]
        Machines, or settings, to compare with.
    """

    as_json: bool = False
    html: Path | None = None
    what_if: Sequence[str] = ()


def subject_of(
    recipe: Path | None,
    model: str | None,
    training: Mapping[str, Any],
    *,
    gradient_checkpointing: bool,
    machine: str | None,
    settings: Sequence[str],
    needs_batch: bool = True,
) -> Subject:
    """What the command line asks for.

    Parameters
    ----------
    training : Mapping[str, Any]
        Sizes of the batch, by their names in a recipe; None for one that is not given.
    needs_batch : bool
        Whether a model alone does not do.

    Raises
    ------
    ConfigError
        If it is not one recipe or one model, or says a thing twice.
    """
    if (recipe is None) == (model is None):
        raise ConfigError("plan needs a recipe (FILE.toml), or --model with --batch-size and --sequence-length")
    given = {name: value for name, value in training.items() if value is not None}
    if recipe is not None:
        if given or gradient_checkpointing:
            raise ConfigError("a recipe tells its batches: change them with --set training.batch_size=... and so on")
        return recipe_subject(recipe, settings, machine)
    if needs_batch and not {"batch_size", "sequence_length"} <= given.keys():
        raise ConfigError("--model needs --batch-size and --sequence-length: time and memory depend on them")
    subject = model_subject(str(model), given, gradient_checkpointing=gradient_checkpointing)
    return replace(subject, machine=machine, settings=tuple(settings))


def print_plan(subject: Subject, outputs: Outputs) -> None:
    """Plan and show it.

    Raises
    ------
    BudgetError
        If it does not fit; the others are shown before.
    ConfigError
        If something asked for cannot work as given.
    """
    _check_page(outputs.html)
    questions = {AS_ASKED: subject, **{what_if: subject.changed(what_if) for what_if in outputs.what_if}}
    planner = Planner()
    baseline_bytes = resident_bytes_trimmed()
    with _working():
        answers = [_answer(planner, what, asked, baseline_bytes) for what, asked in questions.items()]
    asked, *others = answers
    if outputs.as_json:
        print(json.dumps(_object(asked, others), indent=1, allow_nan=False))
    else:
        _show(asked, others)
    if asked.plan is None:
        raise BudgetError(asked.refusal)
    if outputs.html is not None:
        outputs.html.write_text(plan_page(asked.plan, asked.recipe), encoding="utf-8")
        Console(stderr=outputs.as_json).print(f"page written to {outputs.html}", highlight=False)


def print_zero_table(subject: Subject, num_ranks: int, *, as_json: bool) -> None:
    """ZeRO's memory table of the model, and ours beside it.

    Raises
    ------
    ConfigError
        If there is no such model.
    """
    recipe = subject.recipe()
    with _working():
        model = Planner().model_of(recipe)
    dtype = str(model.dtype).removeprefix("torch.")
    rows = stage_table(model.num_params, num_ranks, model.dtype, optimizer_states(recipe.placement))
    if as_json:
        stages = [{"stage": row.stage, "zero_bytes": round(row.zero), "bytes": round(row.ours)} for row in rows]
        print(json.dumps({"num_params": model.num_params, "ranks": num_ranks, "dtype": dtype, "stages": stages}))
        return
    show_zero_table(Console(), rows, model.num_params, num_ranks, dtype)


def _answer(planner: Planner, what: str, subject: Subject, baseline_bytes: int) -> Answer:
    recipe, machine = subject.resolved()
    # Of this machine's process we know what it takes; that of another is its own.
    baseline = baseline_bytes if subject.machine is None else None
    return answer(what, recipe, lambda: planner.plan(recipe, machine, baseline_bytes=baseline))


def _show(asked: Answer, others: Sequence[Answer]) -> None:
    console = Console()
    if asked.plan is not None:
        show_plan(console, asked.plan, asked.recipe)
        console.print()
    if others:
        show_comparison(console, [asked, *others])


def _object(asked: Answer, others: Sequence[Answer]) -> dict[str, Any]:
    return {**_told(asked), "what_if": [{"what": other.what, **_told(other)} for other in others]}


def _told(one: Answer) -> dict[str, Any]:
    return {"refused": one.refusal} if one.plan is None else document(one.plan, one.recipe)


def _check_page(page: Path | None) -> None:
    """Found before planning, not after it."""
    if page is not None and not page.absolute().parent.is_dir():
        raise ConfigError(f"cannot write the page {page}: {page.absolute().parent} is not a folder")


@contextmanager
def _working() -> Iterator[None]:
    """A sign of life on a terminal: a model of many layers takes some seconds."""
    with Console(stderr=True).status("running a step without weights"):
        yield
