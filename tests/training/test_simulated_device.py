"""On a device with memory of its own, whose copies and whose drive come as late, or as early, as they may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import COMBINATIONS, PAIRWISE, Homes, cpu_with_simulated_drive, least_memory, simulated
from support.reference_training import Outcome, Recipe, differences, train_offloaded
from support.simulated_accelerator import Copies, SimulatedAccelerator
from support.simulated_engine import Transfers
from support.small_models import MODELS

from zerooffload.memory import Budget
from zerooffload.telemetry import Recorder, Waits
from zerooffload.tiers import StagingRing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerooffload.accelerator import Event
    from zerooffload.runtime.build import Environment

pytestmark = pytest.mark.usefixtures("small_chunks")

NUM_BYTES = 4096
LLAMA = Recipe(num_steps=6)
LLAMA_BF16 = Recipe(num_steps=6, compute_dtype="bf16")
GPT2 = Recipe(build=MODELS["gpt2"], num_steps=6)


@pytest.mark.parametrize("recipe", [LLAMA, LLAMA_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_late(homes: Homes, recipe: Recipe, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    with simulated(Copies.LATE, Transfers.LAZY) as environment:
        assert_equal(recipe, environment, homes, nvme, plain)
        assert isinstance(environment.accelerator, SimulatedAccelerator)
        assert environment.accelerator.num_spoiled == 0


@pytest.mark.parametrize("copies", Copies)
@pytest.mark.parametrize("transfers", Transfers)
@pytest.mark.parametrize("homes", PAIRWISE, ids="-".join)
def test_gpt2_in_each_mode(
    homes: Homes, transfers: Transfers, copies: Copies, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    with simulated(copies, transfers) as environment:
        assert_equal(GPT2, environment, homes, nvme, plain)


@pytest.mark.parametrize("seed", range(4))
def test_delays(seed: int, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    with simulated(Copies.THREADED, Transfers.THREADED, seed=10 * seed) as environment:
        assert_equal(LLAMA, environment, ("nvme", "nvme", "nvme"), nvme, plain)


@pytest.mark.parametrize("transfers", Transfers)
@pytest.mark.parametrize("homes", [homes for homes in PAIRWISE if "nvme" in homes], ids="-".join)
def test_simulated_drive_of_a_cpu(
    homes: Homes, transfers: Transfers, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    assert_equal(LLAMA, cpu_with_simulated_drive(transfers), homes, nvme, plain)


def test_a_slot_is_not_used_again_before_what_it_lent_was_copied() -> None:
    """A copy that comes as late as it may."""
    accelerator, waits = SimulatedAccelerator(Copies.LATE), Waits(Recorder())
    ring = StagingRing("ring", 1, NUM_BYTES, Budget("host", NUM_BYTES), accelerator)
    block: Any = SimpleNamespace(version=lambda _: 1, layout=SimpleNamespace(file_nbytes=lambda _: NUM_BYTES))
    slot = ring.acquire(waits, "key")
    slot.take(NUM_BYTES).fill_(7)
    slot.keep(block, 0)
    ring.release(slot, keeps=True)
    memory = accelerator.reserve(NUM_BYTES)
    memory.fill()

    def copy(record: torch.Tensor) -> Event:
        accelerator.copy(accelerator.copy_in, memory.tensor, record)
        return accelerator.record(accelerator.copy_in)

    assert ring.lend("key", block, 0, copy)
    ring.acquire(waits).take(NUM_BYTES).fill_(9)
    accelerator.record(accelerator.copy_in).wait()
    assert bool((memory.tensor == 7).all())


def assert_equal(
    recipe: Recipe, environment: Environment, homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    """Within the least device memory; the device never holds more than was announced."""
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB", "device_memory": "16MiB"}
    config["device_memory"] = least_memory(recipe, environment, "device_memory", **config)
    outcome = train_offloaded(recipe, environment, **config)
    assert differences(plain(recipe), outcome) == []
    accelerator = environment.accelerator
    if isinstance(accelerator, SimulatedAccelerator):
        assert outcome.report is not None
        assert accelerator.peak_filled_bytes <= outcome.report.tiers[0].planned_bytes
