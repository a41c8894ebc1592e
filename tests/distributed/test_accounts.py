"""What each rank leases and receives, as formulas in the lengths of the model's parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.environments import Homes
from support.rank_accounts import NUM_SOAK_STEPS, Setup, Stack, buffers_of_steps, held, leased, received
from support.ranks import run_ranks
from support.small_models import small_gpt2
from support.thoroughness import EXHAUSTIVE
from torch import nn

from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.stages import STAGES, parameter_bytes, sharding_of

PAGE = 4096
HOMES: list[Homes] = [
    ("nvme", "nvme", "nvme"),
    ("host", "host", "host"),
    ("device", "host", "nvme"),
    ("nvme", "device", "host"),
    ("host", "nvme", "device"),
]
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
RECORD_BYTES = {"fp32": 8, "bf16": 10}
"""An element of optimizer state: two fp32 moments; with bf16 also the 16 lower bits of the master."""


def up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def units(model: nn.Module) -> dict[str, list[int]]:
    """Elements of the parameters of each unit: embeddings, blocks, and what is left."""
    prefixes = ["transformer.wte.", "transformer.wpe.", "transformer.h.0.", "transformer.h.1."]
    prefixes += [f"blocks.{number}." for number in range(4)]
    found: dict[str, list[int]] = {}
    for name, param in model.named_parameters():
        unit = next((prefix for prefix in prefixes if name.startswith(prefix)), "root")
        found.setdefault(unit, []).append(param.numel())
    return found


class Flat:
    """A unit's parameters, each starting on 64 bytes, cut into equal shards that, if there are several, fill pages."""

    def __init__(self, numels: list[int], world_size: int, dtype: str) -> None:
        self.element = DTYPE_BYTES[dtype]
        *others, last = numels
        self.used = sum(up(numel * self.element, 64) for numel in others) // self.element + last
        shard = -(-self.used // world_size) * self.element
        self.shard = up(shard, PAGE if world_size > 1 else 64)
        self.whole = world_size * self.shard
        self.record = self.shard // self.element * RECORD_BYTES[dtype]

    def moved(self, world_size: int) -> int:
        """What a rank receives of the whole."""
        return self.whole * (world_size - 1) // world_size


def expected_leases(homes: Homes, world_size: int, dtype: str) -> dict[str, int]:
    flats = [Flat(numels, world_size, dtype) for numels in units(small_gpt2()).values()]
    shards, records = [flat.shard for flat in flats], [flat.record for flat in flats]
    tiers = {"device": 0, "host": 0, "nvme": 0}
    for home, of_flats in zip(homes, (shards, records, shards), strict=True):
        # The flats of a state, in pages: with several ranks they are whole pages already.
        tiers[home] += sum(up(nbytes, PAGE) for nbytes in of_flats)
    params, _, gradients = homes
    # Streaming through host memory: four slots for what lies on nvme of the largest flat, two for gradients on nvme.
    slot = sum(up(max(of), PAGE) for home, of in zip(homes, (shards, records, shards), strict=True) if home == "nvme")
    # With ample memory no chunk has to leave the ring: each flat is one.
    tiers["host"] += (max(4, len(flats)) if "nvme" in homes[:2] else 4) * slot
    tiers["host"] += 2 * up(max(shards), PAGE) * (gradients == "nvme")
    # Whole units on the device: all parameters that move; of gradients twice the largest unit and the root's, and with
    # several ranks, where they leave in one order whatever they come in, what is left over: all.
    whole = [up(flat.whole, PAGE) for flat in flats]
    moves, collects = (world_size > 1 or home == "nvme" for home in (params, gradients))
    root = whole[list(units(small_gpt2())).index("root")]
    gathering = sum(whole) if world_size > 1 else min(sum(whole), 2 * (max(whole) + root))
    tiers["device"] += moves * sum(whole) + collects * gathering
    # On a CPU the device's bytes are the host's.
    tiers["host"] += tiers["device"]
    if homes[:2] == ("nvme", "nvme"):
        # Steps are committed: a second slot for what is trained, and a journal, whose record names two chunks a flat.
        tiers["nvme"] += sum(up(nbytes, PAGE) for nbytes in shards + records)
        record = up(72 + up(2 * len(flats), 8) + 8 * 2 * len(flats) + 131_072, PAGE)
        tiers["nvme"] += 2 * record
        tiers["host"] += record
    return tiers


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_leases_are_the_formula(world_size: int, tmp_path: Path) -> None:
    cases = [(homes, dtype) for homes in HOMES for dtype in DTYPE_BYTES]
    for of_rank in run_ranks(leased, world_size, str(tmp_path), HOMES, list(DTYPE_BYTES)):
        for (homes, dtype), found in zip(cases, of_rank, strict=True):
            assert found == expected_leases(homes, world_size, dtype), (homes, dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_rank_holds_its_part_and_less_than_a_page_more_of_each_flat(world_size: int, dtype: str) -> None:
    for numels in units(small_gpt2()).values():
        flat = Flat(numels, world_size, dtype)
        assert 0 <= flat.shard - flat.used * flat.element / world_size < PAGE
        gaps = flat.used - sum(numels)
        assert gaps * flat.element < 64 * len(numels)


Moved = Callable[[dict[str, int]], int]
GATHERED: dict[Setup, Moved] = {
    # Once for the forward; all of it is still there in the backward.
    Setup("stack", least_window=False): lambda unit: sum(unit.values()),
    Setup("gpt2", least_window=False): lambda unit: sum(unit.values()),
    # Forward and backward, but for what nothing has replaced in between: the root's, and the last block.
    Setup("stack", least_window=True): lambda unit: 2 * sum(unit.values()) - unit["root"] - unit["blocks.3."],
    # There the last to be used is the head, whose weight is the token embedding's: it comes for the embedding, for the
    # head in forward and backward, and for the embedding again, in whose backward it is still needed. The position
    # embedding's comes twice.
    Setup("gpt2", least_window=True): lambda unit: 2 * sum(unit.values()) - unit["root"] + unit["transformer.wte."],
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_receives_three_times_the_others_part_less_what_stays(world_size: int, tmp_path: Path) -> None:
    """The parameters twice and the gradients once, of each padded flat; small messages (what got a gradient) apart."""
    setups = list(GATHERED)
    for of_rank in run_ranks(received, world_size, str(tmp_path), setups):
        for setup, steps in zip(setups, of_rank, strict=True):
            unit = moved_by_unit(setup, world_size)
            expected = {"gathered": GATHERED[setup](unit), "reduced": sum(unit.values())}
            assert steps == [expected] * len(steps), setup


@pytest.mark.parametrize("world_size", [2, 4, *([3] if EXHAUSTIVE else [])])
def test_in_stages_0_to_2_a_rank_receives_twice_the_others_part(world_size: int, tmp_path: Path) -> None:
    """Gradients are reduced, and they or the parameters that were updated are gathered, each once in a step.

    That is ZeRO's 2 Psi (N-1)/N, of padded flats, however small the window is.
    """
    places = (("stack", "host", False), ("stack", "nvme", False), ("stack", "nvme", True), ("gpt2", "nvme", True))
    setups = [Setup(model, least, stage, home) for model, home, least in places for stage in (0, 1, 2)]
    for of_rank in run_ranks(received, world_size, str(tmp_path), setups):
        for setup, steps in zip(setups, of_rank, strict=True):
            each = sum(moved_by_unit(setup, world_size).values())
            assert steps == [{"gathered": each, "reduced": each}] * len(steps), setup


def moved_by_unit(setup: Setup, world_size: int) -> dict[str, int]:
    """What a rank receives of each unit, once."""
    numels = units(Stack() if setup.model == "stack" else small_gpt2())
    return {name: Flat(numel, world_size, "fp32").moved(world_size) for name, numel in numels.items()}


def test_what_is_received_grows_with_the_others_part_alone() -> None:
    """So 2 Psi and 3 Psi are constant in the number of ranks: the flats grow by less than a page a rank."""
    for world_size in (2, 3, 4, 64):
        for numels in units(small_gpt2()).values():
            flat = Flat(numels, world_size, "fp32")
            whole_nbytes = flat.moved(world_size) * world_size / (world_size - 1)
            assert 0 <= whole_nbytes - flat.used * flat.element < world_size * PAGE


def test_a_rank_holds_what_the_formula_says() -> None:
    """On 4 ranks, in bf16 with K = 10: the memory that states lie in, beside the formula, stage by stage."""
    world_size, model = 4, Stack(256)
    num_params = sum(param.numel() for param in model.parameters())
    per_param = parameter_bytes(torch.bfloat16, OptimizerStates())
    largest = [0.0] * 4
    for of_rank in run_ranks(held, world_size, STAGES):
        for stage, states in zip(STAGES, of_rank, strict=True):
            formula = per_param.of_rank(num_params, world_size, stage)
            # A shard of each of five flats has less than a page of parameters more; other states' bytes in proportion.
            sharding = sharding_of(stage)
            shards = {name: len(sharding.held(world_size, is_sharded=getattr(sharding, name))) for name in states}
            padding = sum(5 * shards[name] * PAGE * getattr(per_param, name) / per_param.params for name in states)
            assert 0 <= sum(states.values()) - formula < padding, (stage, states)
            largest[stage] = max(largest[stage], sum(states.values()))
    assert largest[0] > largest[1] > largest[2] > largest[3]
    assert largest[0] > 3 * largest[3]


def test_collectives_use_the_same_memory_in_every_step() -> None:
    """So nothing grows and nothing is cut up, however long a run lasts; the first step guesses its order."""
    for of_rank in run_ranks(buffers_of_steps, 2, STAGES):
        for steps in of_rank:
            assert len(steps) == NUM_SOAK_STEPS
            assert steps[1]
            assert all(step == steps[1] for step in steps[2:])
