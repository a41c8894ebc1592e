"""Parameters that a drive writes straight into the memory of a (simulated) device: the same bits, and no copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.environments import TIERS, Homes, least_memory, simulated
from support.pairwise import all_or_covering
from support.reference_training import Outcome, Recipe, differences, train_offloaded
from support.simulated_accelerator import Copies, SimulatedAccelerator
from support.simulated_engine import Transfers
from support.small_models import MODELS, batch
from support.straight_reads import StraightEngine

import zerooffload as zo
from zerooffload.runtime.build import Environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.usefixtures("small_chunks")

NVME: Homes = ("nvme", "nvme", "nvme")
MODES = ("after_backward", "under_next_forward", "during_backward")


def evaluate(model: nn.Module, step: int) -> list[float]:
    """A forward that nobody waits for brings units in for nothing."""
    loss: Any = model(batch(70 + step, 0))
    del loss
    return []


LLAMA = Recipe(num_steps=4)
RECIPES = {
    "fp32": LLAMA,
    "bf16": Recipe(num_steps=4, compute_dtype="bf16"),
    "GPT-2": Recipe(num_steps=4, build=MODELS["gpt2"]),
    "two micro-steps, evaluated": Recipe(num_steps=4, num_micro_steps=2, accumulation_steps=2, before_step=evaluate),
}


def train(recipe: Recipe, environment: Environment, homes: Homes, nvme: Path, **fields: Any) -> Outcome:
    """In the least device memory."""
    config = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB", "device_memory": "16MiB", **fields}
    config["device_memory"] = least_memory(recipe, environment, "device_memory", **config)
    return train_offloaded(recipe, environment, **config)


def straight_reads(environment: Environment) -> int:
    """How many there were; none came too early."""
    engine, accelerator = environment.open_engine(), environment.accelerator
    assert isinstance(engine, StraightEngine)
    assert isinstance(accelerator, SimulatedAccelerator)
    assert accelerator.num_spoiled == 0
    return engine.num_straight


@pytest.mark.parametrize("case", all_or_covering(TIERS, TIERS, RECIPES), ids=str)
def test_the_same_bits(case: tuple[str, str, str], nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    homes, recipe = ("nvme", *case[:2]), RECIPES[case[2]]
    with simulated(straight=True) as environment:
        assert differences(plain(recipe), train(recipe, environment, homes, nvme)) == []
        assert straight_reads(environment) > 0


@pytest.mark.parametrize("case", all_or_covering(Copies, Transfers, MODES), ids=str)
def test_whenever_they_come(
    case: tuple[Copies, Transfers, str], nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    copies, transfers, update = case
    with simulated(copies, transfers, straight=True) as environment:
        assert differences(plain(LLAMA), train(LLAMA, environment, NVME, nvme, update=update)) == []
        assert straight_reads(environment) > 0


def test_bytes_are_counted_as_those_that_are_copied(nvme: Path) -> None:
    moved = []
    for straight in (False, True):
        with simulated(straight=straight) as environment:
            outcome = train(LLAMA, environment, ("nvme", "device", "device"), nvme, update="after_backward")
            assert outcome.report is not None
            moved.append({link: outcome.report.bytes_moved[link] for link in ("nvme_read", "copy_in")})
    assert moved[0] == moved[1]
    assert moved[0]["copy_in"] > 0


def test_where_each_read_is_compared_they_pass_through_the_hosts_memory(
    nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    with simulated(straight=True) as environment:
        assert differences(plain(LLAMA), train(LLAMA, environment, NVME, nvme, verify_reads=True)) == []
        assert straight_reads(environment) == 0


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_read_that_fails_is_told(number: int, nvme: Path) -> None:
    with simulated(straight=True) as environment:
        engine = environment.open_engine()
        assert isinstance(engine, StraightEngine)
        least_memory(LLAMA, environment, "device_memory", params="nvme", nvme_paths=[nvme])
        engine.fail_next("read", after=number)
        with pytest.raises(zo.TierIOError):
            train_offloaded(LLAMA, environment, params="nvme", optimizer="host", gradients="host", nvme_paths=[nvme])
