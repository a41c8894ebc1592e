"""Any recipe on a drive that fails: what is told until then, and what a new run makes of what is left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.environments import cpu_with_simulated_drive, simulated
from support.folders import leftovers
from support.reference_training import Outcome, Recipe, current_params, differences, offload_prepared
from support.simulated_accelerator import Copies
from support.simulated_engine import Fault, SimulatedEngine, Transfers
from support.small_models import batch
from torch import nn

import zerooffload as zo
from zerooffload.optim import OPTIMIZERS
from zerooffload.runtime.build import Environment

OPERATIONS = ("read", "write", "flush")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A short training and where its states live.

    Attributes
    ----------
    recipe : Recipe
    step : int
        The one in which the drive fails, from its first forward to the end of what the loop does after it.
    on_device, straight : bool
        On the simulated device; reads from the drive go straight into its memory.
    transfers : Transfers
    num_paths : int
    in_background : bool
        Whether steps are committed by a thread of their own.
    goes_on : bool
        Whether a new run can come to the same end: not if gradients are carried from step to step.
    config : dict
        Of `OffloadConfig`.
    """

    recipe: Recipe
    step: int = 1
    on_device: bool = False
    straight: bool = False
    transfers: Transfers = Transfers.LAZY
    num_paths: int = 1
    in_background: bool = False
    goes_on: bool = True
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def commits(self) -> bool:
        """Whether a new run goes on from the last step."""
        all_on_nvme = self.config.get("params") == self.config.get("optimizer") == "nvme"
        return bool(self.config.get("durable")) or (all_on_nvme and self.config.get("atomic_steps", True))

    @property
    def acts_between(self) -> bool:
        """Whether its loop does something with the model after a step."""
        return self.recipe.between is not Recipe.between

    @contextmanager
    def environment(self, *faults: Fault) -> Iterator[Environment]:
        """With a drive of files."""
        if self.on_device:
            with simulated(
                Copies.LATE, self.transfers, faults=faults, on_files=True, straight=self.straight
            ) as environment:
                yield replace(environment, commit_in_background=self.in_background)
        else:
            environment = cpu_with_simulated_drive(self.transfers, faults=faults, on_files=True)
            yield replace(environment, commit_in_background=self.in_background)


@dataclass
class Told:
    """What a training said, over all of its runs.

    Attributes
    ----------
    values : dict
        Losses, norms and what `between` returns, by step and place in the step.
    finished : int
        Steps.
    is_between : bool
        Whether the loop was after a step, not in it.
    """

    values: dict[tuple[int, str], float] = field(default_factory=dict)
    finished: int = 0
    is_between: bool = False

    def tell(self, step: int, what: str, value: float) -> None:
        """The same as in an earlier run."""
        assert self.values.setdefault((step, what), value) == value, f"{what} of step {step}, another time"

    def of(self, kind: str) -> list[float]:
        """Losses, norms or what `between` returned, in order."""
        return [value for (_, what), value in sorted(self.values.items()) if what.startswith(kind)]


def train(
    scenario: Scenario,
    folder: Path,
    environment: Environment,
    told: Told,
    begins: Callable[[int], None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """Begin or continue; the parameters at the end. `begins` is told of each step, and of the end."""
    recipe, paths = scenario.recipe, [folder / f"drive-{number}" for number in range(scenario.num_paths)]
    for path in paths:
        path.mkdir(exist_ok=True)
    model = offload_prepared(
        recipe, environment, **{"update": "after_backward", "overwrite": False, "nvme_paths": paths, **scenario.config}
    )
    try:
        optimizer = OPTIMIZERS[recipe.algorithm](recipe.groups(model), lr=recipe.learning_rate, **recipe.options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.schedule or (lambda _: 1.0))
        zo.track(model, scheduler=scheduler)
        torch.manual_seed(0)
        first = zo.resume(model, optimizer) if scenario.commits else 0
        assert told.finished - 1 <= first <= told.finished
        if hasattr(model, "num_calls"):
            model.num_calls = first * recipe.num_micro_steps
        if told.is_between and first == told.finished:
            _after_step(recipe, model, first - 1, told)
        told.finished = first
        for step in range(first, recipe.num_steps):
            begins(step)
            _one_step(recipe, model, optimizer, step, told)
            scheduler.step()
            _after_step(recipe, model, step, told)
        begins(recipe.num_steps)
        return current_params(model)
    finally:
        zo.close(model)


def _one_step(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, told: Told) -> None:
    for micro_step in range(recipe.num_micro_steps):
        loss = recipe.loss(model, batch(step, micro_step))
        told.tell(step, f"loss {micro_step}", loss.item())
        (loss / recipe.num_micro_steps).backward()
    if recipe.max_norm is not None:
        told.tell(step, "norm", float(np.float32(float(zo.clip_grad_norm_(model, recipe.max_norm)))))
    optimizer.step()
    told.finished, told.is_between = step + 1, True
    optimizer.zero_grad()


def _after_step(recipe: Recipe, model: nn.Module, step: int, told: Told) -> None:
    for number, value in enumerate(recipe.between(model, step)):
        told.tell(step, f"found {number:02}", value)
    told.is_between = False


class FaultedTraining:
    """A scenario whose drive never failed, and what comes of it where one does.

    Parameters
    ----------
    plain : Outcome
        Of plain PyTorch.

    Attributes
    ----------
    positions : list[tuple[str, int]]
        Every operation of the scenario's step: its kind, and how many of that kind were before.
    """

    def __init__(self, scenario: Scenario, plain: Outcome, scratch: Path) -> None:
        self.scenario = scenario
        self._scratch = scratch
        self._whole = Told()
        numbers: dict[int, dict[str, int]] = {}
        with scenario.environment() as environment, self._folder() as folder:
            engine = environment.open_engine()
            assert isinstance(engine, SimulatedEngine)
            params = train(
                scenario,
                folder,
                environment,
                self._whole,
                lambda step: numbers.update({step: dict(engine.num_operations)}),
            )
        told = self._whole
        outcome = Outcome(losses=told.of("loss"), found=told.of("found"), norms=told.of("norm"), params=params)
        assert differences(outcome, replace(plain, buffers={})) == []
        self._params = params
        first, last = numbers[scenario.step], numbers[scenario.step + 1]
        self.positions = [(kind, at) for kind in OPERATIONS for at in range(first[kind], last[kind])]

    def check_hidden(self, fault: Fault) -> bool:
        """As `check`, but where an update that ran ahead failed, it may be done again; whether something was told.

        Operations come in another order each time.
        """
        told, failure, params = Told(), None, {}
        with self._folder() as folder:
            with self.scenario.environment(fault) as environment:
                try:
                    params = train(self.scenario, folder, environment, told)
                except zo.TierIOError as error:
                    failure = error
            assert told.values.items() <= self._whole.values.items()
            assert [leftovers(path) for path in folder.iterdir()] == [[]] * self.scenario.num_paths
            if failure is not None:
                assert failure.errno == fault.errno
                if not (self.scenario.commits and self.scenario.goes_on):
                    return True
                with self.scenario.environment() as environment:
                    params = train(self.scenario, folder, environment, told)
            assert told.values == self._whole.values
            assert differences(Outcome(params=params), Outcome(params=self._params)) == []
        return failure is not None

    def check(self, fault: Fault) -> None:
        """The call that failed says so, every number until then is right, and a new run comes to the right end."""
        told = Told()
        with self._folder() as folder:
            with self.scenario.environment(fault) as environment, pytest.raises(zo.TierIOError) as failure:
                train(self.scenario, folder, environment, told)
            assert failure.value.errno == fault.errno
            assert failure.value.operation in {fault.operation, *fault.then}
            assert told.values.items() <= self._whole.values.items()
            assert [leftovers(path) for path in folder.iterdir()] == [[]] * self.scenario.num_paths
            if self.scenario.commits and self.scenario.goes_on:
                with self.scenario.environment() as environment:
                    params = train(self.scenario, folder, environment, told)
                assert told.values == self._whole.values
                assert differences(Outcome(params=params), Outcome(params=self._params)) == []

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as name:
            yield Path(name)
