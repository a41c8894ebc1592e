from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from zerooffload import CheckpointError, ConfigError
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.runtime.tracking import Tracking


class Position:
    """A loader's."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Schedule(Position):
    """What has a step."""

    def step(self) -> None:
        self.value += 1


@pytest.fixture(autouse=True)
def _random_states() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002


@pytest.fixture
def tracking() -> Tracking:
    return Tracking(CpuAccelerator())


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.5, betas=(0.8, 0.9))


def taken(tracking: Tracking) -> dict[str, Any]:
    """What a record holds, through JSON."""
    state = {**tracking.at_step(), **tracking.at_forward(), **tracking.random_at_forward()}
    return dict(json.loads(json.dumps(state, allow_nan=False)))


def draws() -> list[float]:
    """Of each source; Gaussian ones keep a second number back."""
    numpy = np.random.randn()  # noqa: NPY002
    return [random.random(), random.gauss(0, 1), numpy, torch.rand(()).item(), torch.randn(()).item()]  # noqa: S311


def test_loaders_are_taken_at_the_step_and_schedules_at_the_forward(tracking: Tracking) -> None:
    loader, schedule = Position(), Schedule()
    tracking.track({"loader": loader, "schedule": schedule})
    assert tracking.at_step()["objects"] == {"loader": {"value": 0}}
    assert tracking.at_forward()["schedules"] == {"schedule": {"value": 0}}


def test_everything_comes_back(tracking: Tracking, optimizer: torch.optim.Optimizer) -> None:
    loader, schedule = Position(), Schedule()
    loader.value, schedule.value = {"at": torch.arange(3), "seen": {4: (5, float("inf"))}}, 8
    tracking.track({"loader": loader, "schedule": schedule})
    tracking.take_optimizer(optimizer)
    tracking.take_optimizer(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    draws()
    state = taken(tracking)
    expected = draws()
    loader.value, schedule.value = None, None
    optimizer.param_groups[0].update(lr=9.0, betas=(0.0, 0.0))
    random.seed(1)
    tracking.put_back(state, [optimizer])
    assert draws() == expected
    assert torch.equal(loader.value["at"], torch.arange(3))
    assert loader.value["seen"] == {4: (5, float("inf"))}
    assert schedule.value == 8
    (group,) = optimizer.param_groups
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert group["betas"] == (0.8, 0.9)
    assert len(group["params"]) == 1


def test_random_states_of_the_second_moment(tracking: Tracking) -> None:
    state = tracking.random_at_forward()["random_at_forward"]
    expected = draws()
    tracking.put_back_random(json.loads(json.dumps(state)))
    assert draws() == expected


def test_optimizers_are_held_weakly(tracking: Tracking) -> None:
    tracking.take_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    assert tracking.at_forward()["optimizers"] == []


def test_what_has_no_state_is_refused(tracking: Tracking) -> None:
    with pytest.raises(ConfigError, match=r"numbers is a list, which has no state_dict and load_state_dict"):
        tracking.track({"loader": Position(), "numbers": [1]})
    assert tracking.at_step()["objects"] == {}


def test_a_name_stands_for_one_object(tracking: Tracking) -> None:
    loader = Position()
    tracking.track({"loader": loader})
    tracking.track({"loader": loader})
    with pytest.raises(ConfigError, match="loader is tracked already"):
        tracking.track({"loader": Position()})


def test_a_state_that_cannot_be_recorded_is_named(tracking: Tracking) -> None:
    loader = Position()
    loader.value = {"files": [open]}
    tracking.track({"loader": loader})
    with pytest.raises(ConfigError, match=r"the state of loader\['value'\]\['files'\]\[0\] is a builtin"):
        tracking.at_step()


def test_other_objects_than_the_run_had(tracking: Tracking) -> None:
    tracking.track({"loader": Position()})
    state = taken(tracking)
    other = Tracking(CpuAccelerator())
    with pytest.raises(ConfigError, match="the run tracked loader"):
        other.put_back(state, [])
    other.track({"loader": Position(), "schedule": Schedule()})
    with pytest.raises(ConfigError, match="schedule was not tracked"):
        other.put_back(state, [])


def test_other_optimizers_than_the_run_had(tracking: Tracking, optimizer: torch.optim.Optimizer) -> None:
    tracking.take_optimizer(optimizer)
    state = taken(tracking)
    with pytest.raises(ConfigError, match=r"had 1 optimizer\(s\), now there are 0"):
        tracking.put_back(state, [])
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(ConfigError, match=r"1 param group\(s\), now it has 2"):
        tracking.put_back(state, [groups])
    with pytest.raises(CheckpointError, match="it is another one now"):
        tracking.put_back(state, [torch.optim.SGD(params, lr=1.0)])


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False),
    ],
    ids=["lambda", "multistep", "onecycle", "cosine", "cyclic"],
)
def test_torchs_schedules_go_on(make: Any, tracking: Tracking) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        return optimizer, make(optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: Any, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            optimizer.step()
            schedule.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, schedule = made()
    tracking.track({"schedule": schedule})
    tracking.take_optimizer(optimizer)
    rates(optimizer, schedule, 2)
    state = taken(tracking)
    expected = rates(optimizer, schedule, 4)
    optimizer, schedule = made()
    other = Tracking(CpuAccelerator())
    other.track({"schedule": schedule})
    other.put_back(state, [optimizer])
    assert rates(optimizer, schedule, 4) == expected
