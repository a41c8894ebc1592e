"""Whatever fails and whenever: the call tells, and the training comes to its bit-equal end, here or in a new run.

Every sort of fault meets every position of a step, and some meet positions all over the training. With
ZEROOFFLOAD_TEST_EXHAUSTIVE=1 every kind meets every position of that step, and some kind every other position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environments import cpu_with_simulated_drive
from support.reference_training import Outcome, Recipe, current_params, differences, offload_prepared, train_plain
from support.simulated_engine import FAULT_KINDS, Fault, SimulatedEngine, one_of_each_sort
from support.small_models import batch
from support.thoroughness import EXHAUSTIVE, one_in
from torch import nn

import zerooffload as zo

pytestmark = [pytest.mark.usefixtures("small_chunks", "no_cache"), pytest.mark.timeout(60)]

RECIPE = Recipe(num_steps=3, num_micro_steps=1, schedule=lambda step: 1.0 / (1 + step))
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("params", "optimizer", "gradients"), "nvme"),
    "host_memory": "16MiB",
    "device_memory": "120KiB",
    "overwrite": False,
    "update": "after_backward",
}
DURABLE: dict[str, Any] = {"params": "host", "optimizer": "host", "gradients": "nvme", "durable": True}
"""States in memory are updated in place, so an update that fails cannot be undone."""
EVERYTHING = ("read", "write", "flush")
# Operations of this training, all of it. Then those of beginning it: 8 chunks of parameters and 8 of optimizer states
# in two slots each, 8 of gradients, and two records.
NUM_OPERATIONS = {"read": 82, "write": 117, "flush": 9}
NUM_TO_BEGIN = {"read": 0, "write": 42, "flush": 3}
SECOND_STEP = {"read": range(39, 62), "write": range(66, 91), "flush": range(3, 5)}
"""From the commit of the first one to the end of the update."""


def faults_everywhere(stride: int, first: int) -> list[Any]:
    """Every `stride`-th read and write of training and every flush, the kinds in turns; and every kind of write."""
    found = []
    for operation in EVERYTHING:
        start, step = NUM_TO_BEGIN[operation], 1 if operation == "flush" else one_in(stride)
        for at in range(start + first % step, NUM_OPERATIONS[operation], step):
            name = kind_at(at + first)
            found.append(
                pytest.param(Fault(at=at, operation=operation, **FAULT_KINDS[name]), id=f"{operation} {at} {name}")
            )
    return found


def faults_in_a_step(kinds: Callable[[int], Sequence[str]]) -> list[Any]:
    """At every position of the second step; of all kinds with ZEROOFFLOAD_TEST_EXHAUSTIVE=1."""
    found = []
    for operation, positions in SECOND_STEP.items():
        for at in positions:
            for name in list(FAULT_KINDS) if EXHAUSTIVE else kinds(at):
                fault = Fault(at=at, operation=operation, **FAULT_KINDS[name])
                found.append(pytest.param(fault, id=f"step 1, {operation} {at} {name}"))
    return found


def kind_at(number: int) -> str:
    return list(FAULT_KINDS)[number % len(FAULT_KINDS)]


@dataclass
class Told:
    """What a training said, over all of its runs."""

    errors: list[zo.ZeroOffloadError] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    finished: int = 0


def run(folder: Path, faults: list[Fault], told: Told, *, insist: bool, **config: Any) -> Outcome | None:
    """Begin or continue the training. None if it could not be brought to its end."""
    environment = cpu_with_simulated_drive(faults=faults, on_files=True)
    try:
        model = offload_prepared(RECIPE, environment, **{**SETTINGS, "nvme_paths": [folder], **config})
    except zo.TierIOError as error:
        told.errors.append(error)
        return None
    try:
        _train(model, told, insist=insist)
        params = current_params(model)
    except (zo.TierIOError, zo.CheckpointError) as error:
        told.errors.append(error)
        return None
    except zo.ConfigError:
        # Refused after it was told what failed; see `assert_told`.
        return None
    finally:
        _close(model, told)
    return Outcome(params=params)


def _train(model: nn.Module, told: Told, *, insist: bool) -> None:
    optimizer = zo.AdamW(model.parameters(), lr=RECIPE.learning_rate, **RECIPE.options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, RECIPE.schedule)
    zo.track(model, scheduler=scheduler)
    first = again(lambda: zo.resume(model, optimizer), told, times=int(insist))
    assert told.finished - 1 <= first <= told.finished
    told.finished = first
    for step in range(first, RECIPE.num_steps):
        again(lambda step=step: _gradients(model, optimizer, step, told), told, times=int(insist))
        again(optimizer.step, told, times=2 * insist)
        told.finished = step + 1
        optimizer.zero_grad()
        scheduler.step()


def _gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, told: Told) -> None:
    optimizer.zero_grad()
    loss = RECIPE.loss(model, batch(step, 0))
    assert told.losses.setdefault(step, loss.item()) == loss.item()
    loss.backward()
    norm = float(zo.clip_grad_norm_(model, RECIPE.max_norm or 0.0))
    assert told.norms.setdefault(step, norm) == norm


def again(call: Callable[[], Any], told: Told, *, times: int) -> Any:
    """Call; if the drive fails, call so many times more."""
    for _ in range(times):
        try:
            return call()
        except (zo.TierIOError, zo.CheckpointError) as error:
            told.errors.append(error)
    return call()


def _close(model: nn.Module, told: Told) -> None:
    try:
        zo.close(model)
    except zo.TierIOError as error:
        told.errors.append(error)


def assert_told(told: Told, fault: Fault) -> None:
    """At least one error, and each is the drive's, with all that it knows."""
    assert told.errors
    for error in told.errors:
        assert isinstance(error, zo.TierIOError)
        assert error.errno == fault.errno
        assert error.operation in {fault.operation, *fault.then}
        assert Path(error.path).name in {"states.bin", "scratch.bin", "record-0.bin", "record-1.bin"}
        for word in (error.operation, error.path, f"errno {fault.errno}"):
            assert word in str(error)
        if error.operation != "flush":
            assert error.length_bytes > 0
            assert error.length_bytes % 4096 == error.offset_bytes % 4096 == 0
            assert f"at offset {error.offset_bytes}, {error.length_bytes} bytes" in str(error)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return train_plain(RECIPE)


def assert_whole(outcome: Outcome | None, told: Told, plain: Outcome) -> None:
    assert outcome is not None
    assert [told.losses[step] for step in range(RECIPE.num_steps)] == plain.losses
    assert [told.norms[step] for step in range(RECIPE.num_steps)] == plain.norms
    assert differences(outcome, Outcome(params=plain.params)) == []


def test_there_are_so_many_operations(scratch: Path, plain: Outcome) -> None:
    environment = cpu_with_simulated_drive(on_files=True)
    engine = environment.open_engine()
    assert isinstance(engine, SimulatedEngine)
    model = offload_prepared(RECIPE, environment, **SETTINGS, nvme_paths=[scratch])
    assert engine.num_operations == NUM_TO_BEGIN
    told = Told()
    _train(model, told, insist=False)
    zo.close(model)
    assert engine.num_operations == NUM_OPERATIONS
    assert not told.errors
    assert list(told.losses.values()) == plain.losses


@pytest.mark.parametrize("fault", [*faults_everywhere(8, 0), *faults_in_a_step(one_of_each_sort)])
def test_a_new_run_goes_on_from_the_last_committed_step(fault: Fault, scratch: Path, plain: Outcome) -> None:
    told = Told()
    outcome = run(scratch, [fault], told, insist=False)
    if told.errors:
        outcome = run(scratch, [], told, insist=False)
    assert_told(told, fault)
    assert_whole(outcome, told, plain)


@pytest.mark.parametrize("fault", [*faults_everywhere(8, 2), *faults_in_a_step(lambda at: [kind_at(at + 3)])])
def test_a_call_that_is_repeated_goes_on_rightly_or_not_at_all(fault: Fault, scratch: Path, plain: Outcome) -> None:
    told = Told()
    outcome = run(scratch, [fault], told, insist=True)
    if not fault.then and fault.operation == "read":
        # Nothing that fails to be read once ends a run.
        assert outcome is not None
    if outcome is None:
        outcome = run(scratch, [], told, insist=False)
    assert_told(told, fault)
    assert_whole(outcome, told, plain)


@pytest.mark.parametrize("fault", faults_everywhere(9, 1))
def test_states_in_memory_of_which_copies_are_kept(fault: Fault, scratch: Path, plain: Outcome) -> None:
    told = Told()
    outcome = run(scratch, [fault], told, insist=True, **DURABLE)
    if outcome is None:
        assert_told(told, fault)
        outcome = run(scratch, [], told, insist=False, **DURABLE)
    assert_whole(outcome, told, plain)


@pytest.mark.parametrize(
    ("operation", "at"), [("write", at) for at in range(0, 42, 5)] + [("write", 40), ("write", 41), ("flush", 0)]
)
def test_a_run_that_could_not_begin_has_left_nothing(operation: str, at: int, scratch: Path, plain: Outcome) -> None:
    told = Told()
    fault = Fault(at=at, operation=operation)
    assert run(scratch, [fault], told, insist=False) is None
    assert_told(told, fault)
    assert list(scratch.iterdir()) == []
    assert_whole(run(scratch, [], told, insist=False), told, plain)


@pytest.mark.parametrize(("operation", "at"), [("read", 0), ("read", 17), ("write", 0), ("flush", 0)])
def test_a_resume_that_failed_can_be_tried_again(operation: str, at: int, scratch: Path, plain: Outcome) -> None:
    """In the same run, or in another one: nothing was changed."""
    told = Told()
    interrupted = [Fault(at=80, operation="read", then=EVERYTHING)]
    assert run(scratch, interrupted, told, insist=False) is None
    told.errors.clear()
    fault = Fault(at=at, operation=operation, files="states.bin" if operation == "read" else "record-*")
    assert run(scratch, [fault], told, insist=False) is None
    assert len(told.errors) == 1
    assert f"{operation} of " in str(told.errors[0])
    assert_whole(run(scratch, [fault], told, insist=True), told, plain)
