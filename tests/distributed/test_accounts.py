"""What each rank leases and receives, as formulas in the lengths of the model's parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.environments import Homes
from support.rank_accounts import Stack, leased, received
from support.ranks import run_ranks
from support.small_models import small_gpt2
from torch import nn

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
    # Whole units on the device: all parameters that move, and twice the largest unit and the root's of gradients.
    whole = [up(flat.whole, PAGE) for flat in flats]
    moves, collects = (world_size > 1 or home == "nvme" for home in (params, gradients))
    root = whole[list(units(small_gpt2())).index("root")]
    tiers["device"] += moves * sum(whole) + collects * min(sum(whole), 2 * (max(whole) + root))
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
GATHERED: dict[tuple[str, bool], Moved] = {
    # By model, and by whether device memory is the least that it is accepted with.
    # Once for the forward; all of it is still there in the backward.
    ("stack", False): lambda unit: sum(unit.values()),
    ("gpt2", False): lambda unit: sum(unit.values()),
    # Forward and backward, but for what nothing has replaced in between: the root's, and the last block.
    ("stack", True): lambda unit: 2 * sum(unit.values()) - unit["root"] - unit["blocks.3."],
    # There the last to be used is the head, whose weight is the token embedding's: it comes for the embedding, for the
    # head in forward and backward, and for the embedding again, in whose backward it is still needed. The position
    # embedding's comes twice.
    ("gpt2", True): lambda unit: 2 * sum(unit.values()) - unit["root"] + unit["transformer.wte."],
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_receives_three_times_the_others_part_less_what_stays(world_size: int) -> None:
    """The parameters twice and the gradients once, of each padded flat; small messages (what got a gradient) apart."""
    cases = list(GATHERED)
    for of_rank in run_ranks(received, world_size, cases):
        for (model, least_window), steps in zip(cases, of_rank, strict=True):
            numels = units(Stack() if model == "stack" else small_gpt2())
            unit = {name: Flat(numel, world_size, "fp32").moved(world_size) for name, numel in numels.items()}
            expected = {"gathered": GATHERED[model, least_window](unit), "reduced": sum(unit.values())}
            assert steps == [expected] * len(steps), (model, least_window)
