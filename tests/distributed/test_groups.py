"""Groups of ranks: dimensions of a device mesh, and what is no group of this rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.folders import leftovers
from support.meshes import (
    ON_NVME,
    cut_differently,
    refused,
    train_in_groups,
    train_replicated,
)
from support.rank_bound import RanksAndOne
from support.rank_emulation import EmulatedRanks
from support.rank_stages import Case
from support.rank_training import MAX_NORM, NUM_MICRO_STEPS, NUM_STEPS, OPTIONS, even_shares, micro_steps, train_all
from support.ranks import run_ranks
from support.small_models import small_gpt2


@pytest.mark.parametrize("as_mesh", [True, False], ids=["mesh", "group"])
def test_groups_side_by_side_train_like_one_alone(tmp_path: Path, *, as_mesh: bool) -> None:
    side_by_side = run_ranks(train_in_groups, 4, str(tmp_path), as_mesh)
    alone = run_ranks(train_all, 2, str(tmp_path), [ON_NVME], even_shares(2))
    for rank, result in enumerate(side_by_side):
        expected = alone[rank % 2]
        for name in ("losses", "norms", "leased", "moved"):
            assert result[name] == expected[name], (rank, name)
        assert all(torch.equal(result["params"][name], value) for name, value in expected["params"].items())
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("num_replicas", "num_shards"), [(2, 2), (2, 3), (1, 2)])
def test_replicas_train_like_plain_pytorch(num_replicas: int, num_shards: int, tmp_path: Path) -> None:
    """Losses, norms and parameters to the bit: sums inside a replica, then over the replicas, are added so there."""
    world_size = num_replicas * num_shards
    cases: list[Case] = [(3, ("nvme", "nvme", "host")), (2, ("host", "host", "host")), (1, ("nvme", "host", "nvme"))]
    cases.append((0, ("host", "nvme", "host")))
    ranks = run_ranks(train_replicated, world_size, str(tmp_path), num_replicas, cases)
    plain = EmulatedRanks(small_gpt2(), world_size, num_replicas=num_replicas, **OPTIONS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for of_ranks, _ in micro_steps(step, even_shares(world_size)):
            losses.append(plain.micro_step(of_ranks, NUM_MICRO_STEPS))
        norms.append(plain.clip(MAX_NORM))
        plain.step()
    for rank, results in enumerate(ranks):
        for case, result in zip(cases, results, strict=True):
            assert result["losses"] == [of_ranks[rank] for of_ranks in losses], (rank, case)
            assert result["norms"] == norms, (rank, case)
            shard_bytes = result["flat_bytes"] // num_shards
            reduced = (num_shards - 1) * shard_bytes + 2 * (num_replicas - 1) * shard_bytes // num_replicas
            assert result["moved"]["reduced"] == NUM_MICRO_STEPS * reduced, (rank, case)
            for name, value in plain.params().items():
                assert torch.equal(result["params"][name], value), (rank, case, name)
    assert leftovers(tmp_path) == []


def test_replicas_are_as_near_flat_sharding_as_rounding_allows(tmp_path: Path) -> None:
    """Both are within [Note: the bound on ranks] of one rank."""
    cases: list[Case] = [(3, ("host", "host", "host"))]
    replicated = run_ranks(train_replicated, 4, str(tmp_path), 2, cases)
    flat = run_ranks(train_all, 4, str(tmp_path), [cases[0][1]], even_shares(4))
    side_by_side = RanksAndOne(small_gpt2, 4, OPTIONS)
    for step in range(NUM_STEPS):
        side_by_side.step(micro_steps(step, even_shares(4)), MAX_NORM)
    for (one,), other in zip(replicated, flat, strict=True):
        for name, bound in side_by_side.bounds().items():
            difference = (one["params"][name].double() - other["params"][name].double()).abs()
            assert (difference <= 2 * bound).all(), name


def test_other_meshes_and_a_group_of_others_are_refused() -> None:
    for rank, (cube, column, outside) in enumerate(run_ranks(refused, 4)):
        assert "3 dimensions" in cube
        assert "mesh[names]" in cube
        assert "stage=0" in column
        assert ("is not in the process group" in outside) == (rank > 1)


def test_a_rank_whose_model_cannot_be_cut_tells_the_others() -> None:
    first, second = run_ranks(cut_differently, 2)
    assert "planning failed on another rank: rank 1: ConfigError: units=['layers.*'] matches no module" in first
    assert second.startswith("units=['layers.*'] matches no module")
