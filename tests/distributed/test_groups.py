"""Groups of ranks: dimensions of a device mesh, and what is no group of this rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.folders import leftovers
from support.meshes import ON_NVME, refused, train_in_groups
from support.rank_training import even_shares, train_all
from support.ranks import run_ranks


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


def test_a_whole_mesh_and_a_group_of_others_are_refused() -> None:
    for rank, (whole, outside) in enumerate(run_ranks(refused, 4)):
        assert "2 dimensions" in whole
        assert "mesh[name]" in whole
        assert ("is not in the process group" in outside) == (rank > 1)
