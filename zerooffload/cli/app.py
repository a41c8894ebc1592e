"""`zerooffload`: its commands, and how errors reach the user."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from zerooffload import __version__
from zerooffload.errors import InternalError, ZeroOffloadError

EXIT_FOUND_PROBLEM = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="zerooffload",
    help="Train PyTorch models whose states do not fit in memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (the process's own by default) and exit: 0, 2 for a user's error, 130 for Ctrl-C."""
    logging.basicConfig(format="zerooffload: %(message)s", level=logging.WARNING)
    app(args=None if arguments is None else list(arguments), prog_name="zerooffload")
    sys.exit(0)


@contextmanager
def _ends_for_users(context: typer.Context) -> Iterator[None]:
    """What a user did ends in a message and an exit code; a bug of ours, or with --debug any error, in a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        trained = context.command.name in ("train", "resume")
        print(
            "interrupted: ended cleanly" + ("; steps that were committed can be resumed" if trained else ""),
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except InternalError:
        raise
    except ZeroOffloadError as error:
        if context.find_root().params["debug"]:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USER_ERROR) from None


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it
    if wanted:
        print(f"zerooffload {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command; they are read from the context."""


_Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace a setting; may be given several times."),
]
_Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the run's account there: a page if it ends in .html, else JSON."),
]
_Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", help="Write a timeline of the first steps there, for ui.perfetto.dev."),
]
_TraceSteps = Annotated[int, typer.Option(min=1, metavar="STEPS", help="How many steps the timeline shows.")]
_Endurance = Annotated[
    float | None,
    typer.Option(metavar="TBW", min=0.0, help="Terabytes that the nvme drives bear: tell how long they will last."),
]


class _Dtype(Enum):
    """Of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="FILE.toml")],
    *,
    set_: _Settings = None,
    report: _Report = None,
    trace: _Trace = None,
    trace_steps: _TraceSteps = 5,
    drive_endurance_tbw: _Endurance = None,
) -> None:
    """Fine-tune a causal language model as a recipe says."""
    from zerooffload.cli.train import Outputs, train_by_recipe  # noqa: PLC0415 - imports torch

    with _ends_for_users(context):
        train_by_recipe(recipe, set_ or [], Outputs(report, trace, trace_steps, drive_endurance_tbw))


@app.command()
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="The first nvme path of a run, or its checkpoints.", metavar="DIR")],
    *,
    set_: _Settings = None,
    report: _Report = None,
    trace: _Trace = None,
    trace_steps: _TraceSteps = 5,
    drive_endurance_tbw: _Endurance = None,
) -> None:
    """Go on with a run of `train` from the last step that it committed, or from a checkpoint."""
    from zerooffload.cli.train import Outputs, resume_in  # noqa: PLC0415 - imports torch

    with _ends_for_users(context):
        resume_in(folder, set_ or [], Outputs(report, trace, trace_steps, drive_endurance_tbw))


@app.command()
def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The first nvme path of a run, or its checkpoints.", metavar="DIR")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.", metavar="FOLDER")],
    *,
    set_: _Settings = None,
    dtype: Annotated[
        _Dtype | None,
        typer.Option(help="Of the weights; fp32: the exact masters. Default: as they were trained."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="BYTES", help="Of a file, such as 5GB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that holds weights.")] = False,
) -> None:
    """Write the model of a run of `train`, as its last committed step or a checkpoint has it, for from_pretrained."""
    from zerooffload.cli.export import Output, export_from  # noqa: PLC0415 - imports torch

    with _ends_for_users(context):
        export_from(run, set_ or [], Output(folder, dtype and dtype.value, max_shard_size, overwrite=overwrite))


@app.command()
def tune(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="FILE.toml")],
    *,
    set_: _Settings = None,
    machine: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="This machine's profile. Default: what calibrate has left."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="BEST.toml", help="The best recipe. Default: FILE.tuned.toml beside the given one."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, metavar="N", help="About how long it may take. Default: as it needs.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="Most configurations that are tried.")] = 9,
    allow_moments: Annotated[
        bool, typer.Option("--allow-moments", help="Formats of moments may change, which changes the numbers.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fastest settings for a recipe, by short real steps around its plan."""
    from zerooffload.cli.tune import Outputs, tune_recipe  # noqa: PLC0415 - imports torch
    from zerooffload.train.tuning.tune import Effort  # noqa: PLC0415 - imports torch

    effort = Effort(num_trials=trials, most_seconds=seconds)
    with _ends_for_users(context):
        tune_recipe(
            recipe, set_ or [], machine, effort, Outputs(recipe=output, as_json=json), may_use_moments=allow_moments
        )


@app.command()
def promote(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The first nvme path of a run.", metavar="DIR")],
    checkpoints: Annotated[Path, typer.Argument(help="Where to save the checkpoint.", metavar="CHECKPOINTS")],
    *,
    path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Another nvme path of the run; may be given several times."),
    ] = None,
) -> None:
    """Make a checkpoint of the last step that a run committed; no run may use it meanwhile."""
    from zerooffload.entry.checkpoints import promote as promote_run  # noqa: PLC0415 - imports torch

    with _ends_for_users(context):
        print(f"checkpoint made: {promote_run([run, *(path or [])], checkpoints)}")


@app.command()
def calibrate(
    context: typer.Context,
    *,
    path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A folder for the nvme tier, one for each drive."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="The profile. Default: where plans look for it."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile.")] = False,
) -> None:
    """Measure how fast this machine is, in less than a minute, for plans."""
    from zerooffload.cli.calibrate import calibrate_to  # noqa: PLC0415 - imports torch

    with _ends_for_users(context):
        calibrate_to(output, path or [], as_json=json)


@app.command()
def plan(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="The recipe, a TOML file.", metavar="[FILE.toml]")] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Instead of a recipe: a model's folder or hub name, or a config.json."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Samples of a forward of a rank.")] = None,
    sequence_length: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sample.")] = None,
    accumulation: Annotated[int | None, typer.Option(metavar="N", help="Backwards of a step.")] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Blocks are computed again in backward.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A profile's file or name. Default: what calibrate has left of this machine."
        ),
    ] = None,
    set_: _Settings = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|SECTION.KEY=VALUE", help="Compare with another machine, or another setting."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with the step's lanes.")] = None,
    zero_table: Annotated[
        bool, typer.Option("--zero-table", help="Print ZeRO's table of the model's states, and ours beside it.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Of that table.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what a training will take on a machine, before anything is allocated."""
    from zerooffload.cli.plan import Outputs, print_plan, print_zero_table, subject_of  # noqa: PLC0415 - imports torch

    sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "accumulation_steps": accumulation}
    with _ends_for_users(context):
        subject = subject_of(
            recipe,
            model,
            sizes,
            gradient_checkpointing=gradient_checkpointing,
            machine=machine,
            settings=set_ or [],
            needs_batch=not zero_table,
        )
        if zero_table:
            print_zero_table(subject, ranks, as_json=json)
        else:
            print_plan(subject, Outputs(as_json=json, html=html, what_if=what_if or []))


@app.command()
def doctor(
    context: typer.Context,
    *,
    path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A folder for the nvme tier; may be given several times."),
    ] = None,
    verify: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Compare the run in an nvme path with its checksums; give all its paths."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what this machine offers, what is in use and why, and what to do about it."""
    from zerooffload.cli.doctor import print_findings  # noqa: PLC0415 - imports torch

    with _ends_for_users(context):
        has_problem = print_findings(path or [], verify or [], as_json=json)
    if has_problem:
        raise typer.Exit(EXIT_FOUND_PROBLEM)
