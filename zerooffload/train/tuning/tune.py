"""A recipe's fastest configuration, measured; and what that teaches of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from zerooffload import __version__
from zerooffload.config import TierName
from zerooffload.errors import ZeroOffloadError
from zerooffload.machine import core_share
from zerooffload.planner.profiles import MachineProfile
from zerooffload.train.planning import Planner
from zerooffload.train.recipe import Recipe
from zerooffload.train.toml import toml_document
from zerooffload.train.tuning.configurations import Configuration, Surroundings
from zerooffload.train.tuning.corrections import corrections_from
from zerooffload.train.tuning.halving import Halving, most_others, num_turns
from zerooffload.train.tuning.journal import Journal, Turn
from zerooffload.train.tuning.trial import Job, Trial, run_trial

_NUM_TAUGHT = 2
"""Turns that teach what the resources of the machine take."""
_MOST_TIMES = 20
"""As many steps count in a turn, where they are short."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What is spent on a tuning.

    Attributes
    ----------
    num_trials : int
        Most configurations that are tried, the recipe's own among them.
    most_seconds : float, optional
        About what all of it may take; None: as long as it needs.
    num_steps, num_warm_up : int
        Of a turn: steps that count, and that come before them.
    least_seconds : float
        Of the steps that count in a turn, were they as long as the recipe's own: where those are short, more of them
        do. A trial takes some seconds to begin, so that this costs little beside.
    """

    num_trials: int = 9
    most_seconds: float | None = None
    num_steps: int = 5
    num_warm_up: int = 2
    least_seconds: float = 4.0


class Runner(Protocol):
    """Runs a trial. Raises `ZeroOffloadError` where it cannot run."""

    def __call__(self, job: Job, folder_name: str, /) -> Trial:
        """See `run_trial`."""


class Observer:
    """Is told how a tuning goes. This one ignores it."""

    def doing(self, what: str) -> None:
        """Something that has no turns begins."""

    def begins(self, num_turns: int, num_found: int) -> None:
        """So many turns come, of which the journal has some."""

    def tries(self, one: Configuration) -> None:
        """A turn begins."""

    def tried(self, one: Configuration, turn: Turn) -> None:
        """It is over."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A configuration that was tried.

    Attributes
    ----------
    seconds : float, optional
        Of a step; None if it could not run, and `refusal` says why.
    part : float
        Of what the first took in the same rounds.
    """

    configuration: Configuration
    seconds: float | None
    part: float
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning found.

    Attributes
    ----------
    first, best : Configuration
    tried : list[Tried]
        The fastest first.
    is_complete : bool
        False if it was interrupted.
    corrections : Mapping[str, float]
        Of the machine, as they are now.
    """

    first: Configuration
    best: Configuration
    tried: list[Tried]
    is_complete: bool
    corrections: Mapping[str, float]


class Tuning:
    """Tunes one recipe.

    Parameters
    ----------
    machine : MachineProfile
        This machine's, as one rank sees it.
    journal : pathlib.Path
        Where turns are kept until the tuning is done.

    Raises
    ------
    ConfigError
        If another process tunes with that journal.
    """

    def __init__(
        self,
        recipe: Recipe,
        machine: MachineProfile,
        journal: Path,
        effort: Effort | None = None,
        *,
        may_use_moments: bool = False,
        run: Runner = run_trial,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._effort = effort or Effort()
        self._machine = machine
        self._run = run
        self._clock = clock
        self._planner = Planner()
        self._surroundings = Surroundings(
            recipe, machine, self._planner, num_cores=core_share().num_threads, may_use_moments=may_use_moments
        )
        subject = [recipe.model_dump(mode="json"), machine.model_dump(mode="json"), __version__, may_use_moments]
        of_turns = [self._effort.num_steps, self._effort.num_warm_up, self._effort.least_seconds]
        self._journal = Journal(journal, [*subject, *of_turns])
        self._refusals: dict[str, str] = {}
        self._num_steps = self._effort.num_steps
        # What a turn takes, once there was one.
        self._turn_seconds: float | None = None

    def tune(self, observer: Observer | None = None) -> Tuned:
        """Try configurations; an interrupt ends it with what is the best so far, and leaves the journal.

        Raises
        ------
        BudgetError
            If the recipe's own settings do not fit.
        ConfigError
            If they, the model or the data cannot work as given.
        """
        observer = observer or Observer()
        observer.doing("planning")
        first = self._surroundings.first()
        found = {one.key: one for one in (first, *self._surroundings.others(first))}
        halving: Halving[str] = Halving(first.key, lambda key: self._seconds(found[key], observer))
        corrections, is_complete = self._machine.corrections, False
        try:
            observer.begins(1, self._journal.num_found)
            halving.begin()
            others = list(found)[1:][: self._num_others(len(found) - 1)]
            observer.begins(num_turns(len(others)), self._journal.num_found)
            halving.run(others)
            observer.doing("learning what this machine takes")
            corrections, is_complete = self._learned(found[halving.best()]), True
        except KeyboardInterrupt:
            if halving.seconds(first.key) is None:
                raise
        finally:
            self._journal.release()
        if is_complete:
            self._journal.remove()
        return Tuned(
            first=first,
            best=found[halving.best()],
            tried=sorted(self._tried(found, halving), key=lambda one: one.part),
            is_complete=is_complete,
            corrections=corrections,
        )

    def _num_others(self, num_found: int) -> int:
        """Beside the first, which had its turn: as many as there is time for, and one at least."""
        number = min(num_found, self._effort.num_trials - 1)
        if self._effort.most_seconds is None or self._turn_seconds is None:
            return number
        turns = self._effort.most_seconds / self._turn_seconds - _NUM_TAUGHT
        return min(number, max(1, most_others(turns)))

    def _seconds(self, one: Configuration, observer: Observer) -> float | None:
        observer.tries(one)
        turn = self._journal.turn(one.key, lambda: self._turn(one))
        if turn.refusal:
            self._refusals[one.key] = turn.refusal
        if self._turn_seconds is None:
            self._begin_turns(turn)
        observer.tried(one, turn)
        return turn.seconds

    def _begin_turns(self, first: Turn) -> None:
        """After the recipe's own, from which the others have their length."""
        num, seconds = self._effort.num_steps, first.seconds or 0.0
        if seconds:
            self._num_steps = max(num, min(_MOST_TIMES * num, ceil(self._effort.least_seconds / seconds)))
        self._turn_seconds = first.took_seconds + (self._num_steps - num) * seconds

    def _turn(self, one: Configuration) -> Turn:
        begin = self._clock()
        try:
            trial = self._trial(one.recipe, self._num_steps)
        except ZeroOffloadError as error:
            if self._turn_seconds is None:
                # The recipe itself cannot run.
                raise
            return Turn(key=one.key, seconds=None, took_seconds=self._clock() - begin, refusal=str(error))
        seconds = statistics.median(trial.step_seconds)
        return Turn(key=one.key, seconds=seconds, took_seconds=self._clock() - begin)

    def _trial(self, recipe: Recipe, num_steps: int, *, is_traced: bool = False) -> Trial:
        job = Job(recipe=recipe, num_steps=num_steps, num_warm_up=self._effort.num_warm_up, is_traced=is_traced)
        return self._run(job, f"zerooffload-tune-{self._journal.digest[:12]}")

    def _learned(self, best: Configuration) -> dict[str, float]:
        """What steps take in which nothing is hidden, so that each resource works alone."""
        offload = best.recipe.offload.model_copy(update={"update": "after_backward"})
        recipe = best.recipe.model_copy(update={"offload": offload})
        try:
            plan = self._planner.plan(recipe, self._machine)
            num_steps = self._effort.num_steps
            steps = [self._trial(recipe, num_steps, is_traced=True).spans for _ in range(_NUM_TAUGHT)]
        except ZeroOffloadError:
            # It has no room for steps of that kind.
            return self._machine.corrections
        return corrections_from(plan, steps)

    def _tried(self, found: Mapping[str, Configuration], halving: Halving[str]) -> Iterator[Tried]:
        for key, one in found.items():
            seconds = halving.seconds(key)
            if seconds is not None or key in self._refusals:
                refusal = self._refusals.get(key, "")
                yield Tried(configuration=one, seconds=seconds, part=halving.score(key), refusal=refusal)


def tuned_recipe(values: Mapping[str, Any], best: Configuration) -> str:
    """A recipe's values with the settings of a configuration, as TOML."""
    settings = dict(best.settings)
    if not (best.plan.announced.planned_bytes(TierName.NVME) or best.recipe.offload.keeps_activations_on_nvme):
        settings.pop("nvme_paths", None)
    return toml_document({**values, "offload": settings})


def of_one_rank(machine: MachineProfile) -> MachineProfile:
    """The machine as a process that has it for itself sees it."""
    return machine.model_copy(update={"device": machine.device.model_copy(update={"count": 1})})
