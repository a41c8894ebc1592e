"""What people do in training loops, each on homes that need no moving, on a tight window, and on a simulated device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support.environments import least_memory, simulated
from support.folders import leftovers
from support.reference_training import Outcome, Recipe, differences, train_offloaded
from support.small_models import MODELS
from support.training_recipes import LOOPS, NUM_LOOP_STEPS

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.optim.kernels import TorchKernels
from zerooffload.runtime.build import Environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("place", ["host", "tight", "simulated"])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop(loop: str, place: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    recipe = LOOPS[loop]
    everywhere = "host" if place == "host" else "nvme"
    config: dict[str, Any] = dict.fromkeys(("params", "optimizer", "gradients"), everywhere)
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB", "device_memory": "16MiB"}
    with ExitStack() as stack:
        environment = stack.enter_context(simulated()) if place == "simulated" else None
        if place != "host":
            config["device_memory"] = least_memory(recipe, environment, "device_memory", **config)
        outcome = train_offloaded(recipe, environment, **config)
    assert differences(plain(recipe), outcome) == []


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_torch_kernels(model: str, dtype: str | None, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    """Without the native module the numbers are the same."""
    recipe = Recipe(build=MODELS[model], compute_dtype=dtype, num_steps=NUM_LOOP_STEPS)
    environment = Environment(accelerator=CpuAccelerator(), open_engine=no_engine, kernels=TorchKernels())
    outcome = train_offloaded(recipe, environment, params="host", optimizer="host", gradients="host")
    assert differences(plain(recipe), outcome) == []
    assert leftovers(nvme) == []


def no_engine() -> Any:
    pytest.fail("an I/O engine was opened where nothing is on nvme")
