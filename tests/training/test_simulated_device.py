"""On a device with memory of its own, whose copies and whose drive come as late, or as early, as they may."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import COMBINATIONS, PAIRWISE, Homes, cpu_with_simulated_drive, least_memory, simulated
from support.pairwise import all_or_covering
from support.reference_training import Outcome, Recipe, batch, differences, language_loss, train_offloaded
from support.simulated_accelerator import Copies, SimulatedAccelerator
from support.simulated_engine import Transfers
from support.small_models import MODELS, small_llama

import zerooffload as zo
from zerooffload.memory import Budget
from zerooffload.runtime.build import build_run
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


@pytest.mark.parametrize("case", all_or_covering(PAIRWISE, Transfers, Copies), ids=str)
def test_gpt2_in_each_mode(
    case: tuple[Homes, Transfers, Copies], nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    homes, transfers, copies = case
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


PLACEMENTS: dict[str, tuple[Any, bool]] = {
    "all on the device": ("device", False),
    # Slots are as long as a chunk of what they are for, which is shorter than one of what the device updates.
    "by unit": ({"model.*": "device", "*": "nvme"}, False),
    "frozen": ("device", True),
}


@pytest.mark.parametrize("compute_dtype", [None, "bf16", "fp16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_states_are_read_and_changed_one_by_one_where_the_device_updates_them(
    placement: str, compute_dtype: str | None, nvme: Path
) -> None:
    tier, freezes = PLACEMENTS[placement]
    expected = exchanged(cpu_with_simulated_drive(), nvme, "host", compute_dtype, freezes=freezes)
    with simulated(Copies.LATE) as environment:
        found = exchanged(environment, nvme, tier, compute_dtype, freezes=freezes)
        assert isinstance(environment.accelerator, SimulatedAccelerator)
        assert environment.accelerator.num_spoiled == 0
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def exchanged(
    environment: Environment, nvme: Path, tier: Any, compute_dtype: str | None, *, freezes: bool
) -> dict[str, torch.Tensor]:
    """What each way to see or change single states shows, in a training that goes on with it."""
    found: dict[str, torch.Tensor] = {}
    model = small_llama()
    model.model.embed_tokens.weight.requires_grad_(not freezes)
    homes = {"params": tier, "optimizer": tier, "gradients": tier, "compute_dtype": compute_dtype}
    run = build_run(model, zo.OffloadConfig(**homes, nvme_paths=[nvme], atomic_steps=False), environment)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)

    def train(name: str) -> None:
        loss = language_loss(model, batch(0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {name}"] = loss.detach()

    def note_state(name: str) -> dict[str, Any]:
        state = optimizer.state_dict()
        for number, entry in state["state"].items():
            found.update({f"{name}: {key} of {number}": value.clone() for key, value in entry.items()})
        return state

    train("at first")
    leased = [usage.leased_bytes for usage in run._resources.usage()]
    state = note_state("first state")
    with zo.full_params(model), torch.no_grad():
        for param in model.parameters():
            param.view(-1)[::3].mul_(1.5)
    note_state("state after an edit")
    language_loss(model, batch(0, 1)).backward()
    with zo.full_params(model, grads=True):
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[f"gradient of {name}"] = param.grad.clone()
                param.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    train("with the first state")
    note_state("last state")
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    train("with another optimizer")
    note_state("another optimizer's state")
    with zo.full_params(model, writeback=False):
        found.update({name: param.detach().clone() for name, param in model.named_parameters()})
    del state
    gc.collect()
    assert [usage.leased_bytes for usage in run._resources.usage()] == leased
    zo.close(model)
    return found


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
