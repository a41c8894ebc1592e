"""Everything leaves the device between steps, and training goes on with the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import PAIRWISE, Homes, least_memory, simulated
from support.reference_training import Outcome, Recipe, differences, offload_prepared, train_offloaded
from support.simulated_accelerator import SimulatedAccelerator
from support.small_models import batch

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.usefixtures("small_chunks")

RECIPE = Recipe(num_steps=5)
IN_BF16 = Recipe(num_steps=3, compute_dtype="bf16")


def device_bytes(model: nn.Module) -> int:
    residence = residence_of(next(model.parameters()))
    assert residence is not None
    return residence.run._resources.budgets["device"].leased_bytes


def leave_and_come_back(accelerator: SimulatedAccelerator | None, model: nn.Module, step: int) -> list[float]:
    if residence_of(next(model.parameters())) is None or step % 2:
        return []
    before = device_bytes(model)
    zo.release_device(model)
    if accelerator is not None:
        assert device_bytes(model) == 0
        assert accelerator.filled_bytes == 0
    zo.reclaim_device(model)
    zo.reclaim_device(model)
    assert device_bytes(model) == before
    return []


def config_of(homes: Homes, nvme: Path) -> dict[str, Any]:
    states = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    return {**states, "nvme_paths": [nvme], "host_memory": "16MiB", "device_memory": "16MiB"}


@pytest.mark.parametrize("recipe", [RECIPE, IN_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("homes", PAIRWISE, ids="-".join)
def test_nothing_of_ours_stays(homes: Homes, recipe: Recipe, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    with simulated() as environment:
        accelerator = environment.accelerator
        assert isinstance(accelerator, SimulatedAccelerator)
        config = config_of(homes, nvme)
        config["device_memory"] = least_memory(recipe, environment, "device_memory", **config)
        leaving = replace(recipe, between=partial(leave_and_come_back, accelerator))
        outcome = train_offloaded(leaving, environment, **config)
        assert accelerator.num_spoiled == 0
    assert differences(plain(recipe), outcome) == []


@pytest.mark.parametrize("homes", [("host", "host", "host"), ("nvme", "host", "nvme")], ids="-".join)
def test_on_a_cpu_the_window_is_given_back(homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    leaving = replace(RECIPE, between=partial(leave_and_come_back, None))
    assert differences(plain(RECIPE), train_offloaded(leaving, **config_of(homes, nvme))) == []


@pytest.fixture(
    params=[("device", "device", "device"), ("host", "host", "host"), ("nvme", "nvme", "nvme")], ids="-".join
)
def model(request: pytest.FixtureRequest, nvme: Path) -> Iterator[nn.Module]:
    """On a simulated device, after a backward."""
    with simulated() as environment:
        model = offload_prepared(RECIPE, environment, **config_of(request.param, nvme))
        RECIPE.loss(model, batch(0, 0)).backward()
        yield model
        zo.close(model)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: RECIPE.loss(model, batch(0, 1)),
    "clipping": lambda model: zo.clip_grad_norm_(model, 1.0),
    "step": lambda model: zo.AdamW(model.parameters()).step(),
    "full_params": lambda model: zo.full_params(model).__enter__(),
    "state_dict": lambda model: model.state_dict(),
    "a parameter": lambda model: next(model.parameters()).sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_what_needs_the_device_is_refused_until_it_is_back(model: nn.Module, use: Callable[[nn.Module], Any]) -> None:
    zo.release_device(model)
    with pytest.raises(zo.ConfigError, match=r"call zo\.reclaim_device\(model\)"):
        use(model)
    zo.reclaim_device(model)
    assert torch.isfinite(zo.clip_grad_norm_(model, 1.0))


def test_a_model_that_is_in_use_does_not_leave(model: nn.Module) -> None:
    with pytest.raises(zo.ConfigError, match=r"call zo\.release_device outside"), zo.full_params(model):
        zo.release_device(model)
    assert torch.isfinite(zo.clip_grad_norm_(model, 1.0))


def test_a_run_ends_off_the_device(model: nn.Module) -> None:
    zo.release_device(model)
    zo.close(model)


def test_a_host_without_room_is_told_before_anything_moves(nvme: Path) -> None:
    with simulated() as environment:
        config = config_of(("device", "device", "device"), nvme)
        config["host_memory"] = "8KiB"
        model = offload_prepared(RECIPE, environment, **config)
        before = device_bytes(model)
        with pytest.raises(zo.BudgetError, match="states set aside"):
            zo.release_device(model)
        assert device_bytes(model) == before
        assert torch.isfinite(RECIPE.loss(model, batch(0, 0)))
        zo.close(model)
