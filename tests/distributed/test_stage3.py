"""Stage 3 over gloo ranks: the same training as one rank on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_training import ACCUMULATION, STEPS, train, train_all_tiers
from support.ranks import run_ranks


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(0, 1, str(tmp_path_factory.mktemp("nvme")), ("host", "host", "host"))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_tiers_are_bit_equal_and_match_one_rank(world_size: int, one_rank: dict[str, Any], tmp_path: Path) -> None:
    results = run_ranks(train_all_tiers, world_size, str(tmp_path), limit_seconds=280)
    for result in results:
        # Of each flat every rank receives the others' part: once for the gradients of each backward, up to twice (less
        # what stays gathered) for the parameters of each forward and backward.
        others_part = result["flat_bytes"] * (world_size - 1) // world_size
        assert result["moved"]["reduced"] == ACCUMULATION * others_part
        assert others_part <= result["moved"]["gathered"] <= 2 * ACCUMULATION * others_part
        # Gradients are summed in another order: some units in the last place of fp32 a step, and AdamW divides by the
        # root of the second moment, so an element whose gradient is mere rounding error may move by lr either way.
        for mine, reference in zip(result["losses"], one_rank["losses"], strict=True):
            assert abs(mine - reference) <= 64 * torch.finfo(torch.float32).eps * abs(reference)
        for name, value in one_rank["params"].items():
            assert torch.equal(result["params"][name], results[0]["params"][name])
            assert (result["params"][name] - value).abs().max() <= STEPS * 2e-3
            assert (result["params"][name] - value).abs().mean() <= 1e-6
    assert not list(tmp_path.iterdir())
