"""Stage 3 over gloo ranks: bit-equal to plain PyTorch that adds gradients in the same order, and near one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.environments import COMBINATIONS, PAIRWISE
from support.folders import leftovers
from support.rank_bound import RanksAndOne
from support.rank_emulation import EmulatedRanks
from support.rank_training import (
    MAX_NORM,
    NUM_MICRO_STEPS,
    NUM_ROWS,
    NUM_STEPS,
    OPTIONS,
    Share,
    even_shares,
    micro_steps,
    train,
    train_all,
)
from support.ranks import run_ranks
from support.small_models import small_gpt2
from support.thoroughness import EXHAUSTIVE

Result = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What each rank has in the end; the same under every combination of tiers, on more ranks under each pair."""
    folder, world_size = tmp_path_factory.mktemp("nvme"), request.param
    homes = COMBINATIONS if world_size == 2 or EXHAUSTIVE else PAIRWISE
    results = run_ranks(train_all, world_size, str(folder), homes, even_shares(world_size), limit_seconds=280)
    assert leftovers(folder) == []
    return results


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(Share(0, NUM_ROWS), str(tmp_path_factory.mktemp("nvme")))


def test_bit_equal_to_plain_pytorch(ranks: list[Result]) -> None:
    plain = EmulatedRanks(small_gpt2(), len(ranks), **OPTIONS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for of_ranks, _ in micro_steps(step, even_shares(len(ranks))):
            losses.append(plain.micro_step(of_ranks, NUM_MICRO_STEPS))
        norms.append(plain.clip(MAX_NORM))
        plain.step()
    assert [result["losses"] for result in ranks] == [list(of_rank) for of_rank in zip(*losses, strict=True)]
    for result in ranks:
        assert result["norms"] == norms
        for name, value in plain.params().items():
            assert torch.equal(result["params"][name], value), name


def test_one_rank_is_as_near_as_rounding_allows(ranks: list[Result], one_rank: Result) -> None:
    """See [Note: the bound on ranks]; what the package computed on either side is held against it."""
    side_by_side = RanksAndOne(small_gpt2, len(ranks), OPTIONS)
    for step in range(NUM_STEPS):
        side_by_side.step(micro_steps(step, even_shares(len(ranks))), MAX_NORM)
    for rank in ranks:
        for norm, expected, largest in zip(rank["norms"], one_rank["norms"], side_by_side.norms, strict=True):
            assert abs(norm - expected) <= largest
        for name, bound in side_by_side.bounds().items():
            difference = (rank["params"][name].double() - one_rank["params"][name].double()).abs()
            assert (difference <= bound).all(), name
    of_ranks = zip(*(rank["losses"] for rank in ranks), strict=True)
    for losses, expected, largest in zip(of_ranks, one_rank["losses"], side_by_side.losses, strict=True):
        assert abs(sum(losses) / len(losses) - expected) <= largest
    # The bound says something: it is far below what a step changes.
    assert max(float(bound.max()) for bound in side_by_side.bounds().values()) < OPTIONS["lr"] / 20


def test_the_bound_finds_a_rank_that_counts_a_little_more() -> None:
    side_by_side = RanksAndOne(small_gpt2, 2, OPTIONS)
    first, second = even_shares(2)
    side_by_side.step(micro_steps(0, [Share(first.first, first.last, 1 + 1e-4), second]), MAX_NORM)
    assert side_by_side.excess() > 1.0
