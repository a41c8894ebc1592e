"""A drive that fails once while a run commits its steps: the right numbers or an error, then and after `zo.resume`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.durable_training import (
    ALL_ON_NVME,
    Reference,
    Scenario,
    Training,
    environment_with,
    in_turns,
    of_rank,
    real_environment,
    train_ranks_uninterrupted,
    training,
)
from support.power_cuts import resumed_as
from support.rank_turns import TurnCollectives, Turns
from support.simulated_engine import Fault, SimulatedEngine, Transfers

import zerooffload as zo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerooffload.runtime.build import Environment

    Uninterrupted = Callable[[Scenario], Reference]

SCENARIOS = {
    "on nvme": Scenario(edits=True),
    "durable": Scenario(edits=True, config={"params": "host", "optimizer": "host", "durable": True}),
}


def failing(operation: str, at: int, **options: Any) -> Environment:
    """One operation fails."""
    fault = Fault(at=at, operation=operation)
    return environment_with(lambda: SimulatedEngine(Transfers.EAGER, faults=[fault], on_files=True), **options)


def goes_on(scenario: Scenario, folder: Path, reference: Reference) -> int:
    """The step that the directory resumes at; compared."""
    with training(scenario, folder, real_environment()) as run:
        step = run.resume()
        assert reference.moments[step].differences(run.moment()) == []
        assert run.finish() == reference.losses[run.loader.position - len(reference.losses) :] or run.is_over()
    return step


@pytest.mark.parametrize("kind", SCENARIOS)
@pytest.mark.parametrize("operation", ["write", "flush"])
def test_one_failure_anywhere(kind: str, operation: str, uninterrupted: Uninterrupted, scratch: Path) -> None:
    """Whoever does not repeat anything finds all but one finished step, and continues rightly."""
    scenario = SCENARIOS[kind]
    reference = uninterrupted(scenario)
    failed = []
    for at in range(200):
        folder = scratch / f"{at}"
        finished = 0
        try:
            with training(scenario, folder, failing(operation, at)) as run:
                try:
                    run.finish()
                finally:
                    finished = run.num_steps
        except zo.TierIOError as error:
            failed.append(error.operation)
        else:
            break
        assert goes_on(scenario, folder, reference) >= finished - 1
    assert set(failed) == {operation}
    assert len(failed) > 8


EDITED = {
    "fp32": Scenario(edits=True),
    "bf16": Scenario(edits=True, config={**ALL_ON_NVME, "compute_dtype": "bf16"}),
    "durable, bf16": Scenario(
        edits=True, config={"params": "host", "optimizer": "nvme", "durable": True, "compute_dtype": "bf16"}
    ),
}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kind", EDITED)
def test_an_edit_that_fails_is_undone_or_the_end(
    kind: str, operation: str, uninterrupted: Uninterrupted, scratch: Path, *, in_background: bool
) -> None:
    """While nothing of it is at home it can be repeated; else nobody trains on half of it, here or in a new run."""
    scenario, endings = EDITED[kind], []
    reference = uninterrupted(scenario)
    for at in range(40):
        folder = scratch / f"{at}"
        engine = SimulatedEngine(Transfers.EAGER, on_files=True)
        environment = environment_with(lambda engine=engine: engine, in_background=in_background)  # type: ignore[misc]
        try:
            with training(scenario, folder, environment) as run:
                edit_stubbornly(run, engine, operation, at, endings)
                run.finish()
                assert reference.last is not None
                assert reference.last.differences(run.moment()) == []
        except zo.ConfigError as error:
            endings.append("the end" if "an edit ended half-way (TierIOError" in str(error) else str(error))
            assert goes_on(scenario, folder, reference) == 0
        except zo.TierIOError:
            # It came after the edit.
            break
    assert endings
    assert set(endings) <= ({"undone", "the end"} if operation == "read" else {"the end"})
    assert endings == sorted(endings, reverse=True)


def edit_stubbornly(run: Training, engine: SimulatedEngine, operation: str, at: int, endings: list[str]) -> None:
    """The next edit meets a fault, and is repeated."""
    edit = run.edit

    def failing_edit() -> None:
        del run.edit
        engine.fail_next(operation, after=at)
        try:
            edit()
        except zo.TierIOError:
            # Whoever goes on training all the same is refused.
            with suppress(zo.TierIOError):
                edit()
                endings.append("undone")

    run.edit = failing_edit  # type: ignore[method-assign]


@pytest.mark.parametrize("in_background", [False, True])
def test_an_edit_that_fails_on_one_of_two_ranks(scratch: Path, *, in_background: bool) -> None:
    """The other one, whose edit is whole, does not commit it either."""
    scenario = replace(EDITED["bf16"], width=72, edits=False)
    references = train_ranks_uninterrupted(scenario, scratch / "uninterrupted", 2)

    def train(rank: int, turns: Turns) -> list[str]:
        engine, told = SimulatedEngine(Transfers.EAGER, on_files=True), []
        env = of_rank(
            environment_with(lambda: engine, in_background=in_background), turns, TurnCollectives(turns, rank)
        )
        # Its end tells it once more.
        with suppress(zo.RankError), training(scenario, scratch / "cut", env) as run:
            run.one_batch()
            if rank == 1:
                # A parameter is changed, and its remainder not.
                engine.fail_next("write", after=1)
            for call in (run.edit, run.finish):
                try:
                    call()
                except zo.ZeroOffloadError as error:
                    told.append(type(error).__name__)
        return told

    def resume(rank: int, turns: Turns) -> int:
        env = of_rank(real_environment(), turns, TurnCollectives(turns, rank))
        return resumed_as(references[rank], scenario, scratch / "cut", env, to_the_end=True)

    assert in_turns(2, train) == [["RankError"], ["TierIOError", "ConfigError"]]
    assert in_turns(2, resume) == [0, 0]


def test_an_update_fails_after_an_edit_that_no_step_has_committed(scratch: Path) -> None:
    """Its chunks may be written in place: what happened half is not taken for undone."""
    scenario = Scenario(config={**ALL_ON_NVME, "gradients": "nvme"})

    def until_step(run: Training) -> None:
        for _ in range(2):
            run.one_batch()
        loss = run.model(run.loader.next())
        loss.backward()
        run.edit()

    def params_after(run: Training) -> dict[str, torch.Tensor]:
        run.optimizer.step()
        return dict(run.moment().values["params"])

    with training(scenario, scratch / "whole", real_environment()) as run:
        until_step(run)
        expected = params_after(run)
    refused = []
    # Two units have a gradient then, with two states each.
    for at in range(4):
        engine = SimulatedEngine(Transfers.EAGER, on_files=True)
        with training(scenario, scratch / f"{at}", environment_with(lambda engine=engine: engine)) as run:  # type: ignore[misc]
            until_step(run)
            engine.fail_next("write", after=at)
            with pytest.raises(zo.TierIOError):
                run.optimizer.step()
            try:
                got = params_after(run)
            except zo.ConfigError as error:
                refused.append(str(error))
            else:
                assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert len(refused) == 4
    assert all("half-way" in text for text in refused)
