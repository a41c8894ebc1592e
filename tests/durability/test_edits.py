"""Parameters that a loop changes by hand: part of the step, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.durable_training import ALL_ON_NVME, Scenario, Training, real_environment, training

import zerooffload as zo

if TYPE_CHECKING:
    from pathlib import Path

DURABLE = {"params": "host", "optimizer": "host", "durable": True}


def set_shift(run: Training) -> None:
    with torch.no_grad(), zo.full_params(run.model):
        run.model.get_parameter("blocks.0.0.weight").zero_()
        run.model.get_parameter("shift").fill_(7.0)


@pytest.mark.parametrize("config", [ALL_ON_NVME, DURABLE], ids=["nvme", "durable"])
def test_a_frozen_parameter_cannot_be_changed_where_steps_are_committed(config: dict[str, Any], scratch: Path) -> None:
    """It has one slot: a crash would leave neither the old values nor the new, or the model's own come back."""
    with training(Scenario(config=config), scratch, real_environment()) as run:
        run.one_batch()
        before = run.moment()
        with pytest.raises(zo.ConfigError, match="shift was frozen"):
            set_shift(run)
        assert before.differences(run.moment()) == []
        run.finish()
    with training(Scenario(config=config), scratch, real_environment()) as run:
        assert run.resume() == 3


@pytest.mark.parametrize("config", [{**ALL_ON_NVME, "atomic_steps": False}, {}], ids=["nvme", "host"])
def test_it_can_be_changed_where_they_are_not(config: dict[str, Any], scratch: Path) -> None:
    with training(Scenario(config=config), scratch, real_environment()) as run:
        run.one_batch()
        set_shift(run)
        assert bool((run.moment().values["params"]["shift"] == 7.0).all())


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("config", [ALL_ON_NVME, DURABLE], ids=["nvme", "durable"])
def test_what_a_loop_does_between_two_steps_belongs_to_the_first(
    config: dict[str, Any],
    in_background: bool,  # noqa: FBT001
    scratch: Path,
) -> None:
    """Parameters, optimizer states and the schedule, in any order, with an evaluation in between."""
    scenario = Scenario(config=config)
    environment = real_environment(in_background=in_background)
    with training(scenario, scratch, environment) as run:
        run.one_batch()
        run.edit()
        with torch.no_grad():
            run.model(torch.zeros((1, 2), dtype=torch.long))
        state = run.optimizer.state_dict()
        entry = state["state"][1]
        entry["exp_avg"].fill_(0.5)
        entry["step"].fill_(9)
        run.optimizer.load_state_dict(state)
        run.scheduler.step()
        run.edit()
        expected = run.moment().values
    with training(scenario, scratch, environment) as run:
        assert run.resume() == 1
        got = run.moment().values
        for name in ("params", "scheduler", "rates"):
            assert repr(got[name]) == repr(expected[name])
        for key, entry in expected["optimizer"]["state"].items():
            assert all(torch.equal(value, got["optimizer"]["state"][key][name]) for name, value in entry.items())
