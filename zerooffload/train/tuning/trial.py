"""A trial: some steps of a recipe, in a process of its own.

[Note: a trial is a process]
What a run leaves in its process changes the next one there: the C library's arenas, torch's caches and threads, pinned
memory, a device's context, kernels that are loaded. So each trial gets a process, whose memory is the run's own. It can
be ended at any time; if the system ends it for want of memory, that is an answer too. It ends with the process that
started it, however that ends.
What it trains is thrown away. Its files are in a folder of its own in each nvme path, and the recipe's own run is not
touched; no checkpoint is saved.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from zerooffload.errors import BudgetError, ConfigError, ZeroOffloadError
from zerooffload.telemetry import Lane, LastStep, Span
from zerooffload.train.loop import train
from zerooffload.train.recipe import Recipe, recipe_from

_PROCESS = ("-P", "-m", "zerooffload.train.tuning.trial")
_TOLD_LINES = 20
"""Of what a trial that failed has written, the last ones."""
_KINDS: Mapping[str, type[ZeroOffloadError]] = {"BudgetError": BudgetError, "ConfigError": ConfigError}
"""Of errors, those that mean something to who asks for a trial."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a trial does.

    Attributes
    ----------
    recipe : Recipe
        Its numbers of steps, checkpoints and evaluations are of no account.
    num_steps : int
        That count.
    num_warm_up : int
        That come before them.
    is_traced : bool
        Whether what takes place in the last step is wanted, which costs a little time.
    """

    recipe: Recipe
    num_steps: int
    num_warm_up: int = 2
    is_traced: bool = False


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial took. Bytes and seconds.

    Attributes
    ----------
    step_seconds : Sequence[float]
        Of each step that counts.
    bytes_moved : Mapping[str, float]
        By link, of a step: the mean.
    planned_bytes, peak_bytes : Mapping[str, int]
        Of each tier: leased.
    baseline_bytes, process_peak_bytes : int
        Resident memory before the model was made, and at most.
    spans : Sequence[Span]
        Of the last step, if it was traced.
    """

    step_seconds: Sequence[float]
    bytes_moved: Mapping[str, float]
    planned_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    baseline_bytes: int
    process_peak_bytes: int
    spans: Sequence[Span] = ()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From what `asdict` gave, by way of JSON."""
        spans = [Span(**{**span, "lane": Lane(span["lane"])}) for span in values["spans"]]
        return cls(**{**values, "spans": spans})


def run_trial(job: Job, folder_name: str, *, take: Callable[[Job], Trial] | None = None) -> Trial:
    """Run it; in any case nothing is left of it.

    Parameters
    ----------
    folder_name : str
        Of the folder in each nvme path that holds its files. What is there already is removed.
    take : callable, optional
        Trains. Default: a process of its own does.

    Raises
    ------
    ZeroOffloadError
        What the run raised: `BudgetError` if it does not fit. Also if its process ended otherwise.
    """
    with _own_folders(job.recipe.offload.nvme_paths, folder_name) as paths:
        offload = job.recipe.offload.model_copy(update={"nvme_paths": paths})
        recipe = job.recipe.model_copy(update={"offload": offload})
        return (take or _in_own_process)(replace(job, recipe=recipe))


def _in_own_process(job: Job) -> Trial:
    words = {"num_steps": job.num_steps, "num_warm_up": job.num_warm_up, "is_traced": job.is_traced}
    values = job.recipe.model_dump(mode="json", exclude_unset=True)
    answer = _answer_of_process(json.dumps({**words, "recipe": values}))
    if "trial" in answer:
        return Trial.from_mapping(answer["trial"])
    raise _KINDS.get(answer["refused"], ZeroOffloadError)(answer["message"])


@contextmanager
def _own_folders(paths: Sequence[Path], name: str) -> Iterator[tuple[Path, ...]]:
    own = tuple(path / name for path in paths)
    try:
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(mode=0o700)
            except OSError as error:
                raise ConfigError(f"cannot make {folder}: {error.strerror}") from error
        yield own
    finally:
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)


def _answer_of_process(job: str) -> dict[str, Any]:
    """What a process that is given a job answers; it is ended in any case."""
    # Whose other end closes with this process, however that ends.
    lifeline, held = os.pipe()
    try:
        done = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, *_PROCESS, str(lifeline)],
            input=job,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[lifeline],
            # Ctrl-C is for the process that asks.
            start_new_session=True,
        )
    finally:
        os.close(lifeline)
        os.close(held)
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    code = done.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return {"refused": "", "message": "\n".join([f"a trial {how}", *done.stderr.splitlines()[-_TOLD_LINES:]])}


def main(lifeline: int) -> None:
    """The process: a job comes on standard input, its answer goes to standard output, all else to standard error."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        values = json.load(sys.stdin)
        job = Job(**{**values, "recipe": recipe_from(values["recipe"])})
        try:
            answer: dict[str, Any] = {"trial": asdict(take_trial(job))}
        except ZeroOffloadError as error:
            answer = {"refused": type(error).__name__, "message": str(error)}
        json.dump(answer, answers)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def take_trial(job: Job) -> Trial:
    """Train here."""
    last_step = LastStep()
    result = train(_thrown_away(job), listeners=[last_step] if job.is_traced else [])
    reports = [record.report for record in result.steps[job.num_warm_up :]]
    picture, links = last_step.picture(), reports[-1].bytes_moved
    return Trial(
        step_seconds=[report.seconds for report in reports],
        bytes_moved={link: sum(report.bytes_moved[link] for report in reports) / len(reports) for link in links},
        planned_bytes={tier.name: tier.planned_bytes for tier in reports[-1].tiers},
        peak_bytes={tier.name: tier.peak_bytes for tier in reports[-1].tiers},
        baseline_bytes=result.baseline_bytes,
        process_peak_bytes=result.process_peak_bytes,
        spans=[] if picture is None else list(picture.spans),
    )


def _thrown_away(job: Job) -> Recipe:
    """The recipe, of so many steps, after which nothing is kept."""
    num_steps = job.num_warm_up + job.num_steps
    training = job.recipe.training.model_copy(update={"steps": num_steps, "evaluation_windows": 0})
    return job.recipe.model_copy(update={"training": training, "checkpoint": None})


if __name__ == "__main__":
    main(int(sys.argv[1]))
