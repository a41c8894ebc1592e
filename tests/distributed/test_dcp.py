"""FSDP2 users come and go: checkpoints of torch.distributed.checkpoint, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.rank_dcp import continue_both_ways, load_and_compare, save_for_fsdp2, save_from_fsdp2
from support.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def from_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of FSDP2 saved."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks(save_from_fsdp2, 2, str(folder))
    return folder


@pytest.mark.parametrize("name", ["nested", "flat"])
def test_a_checkpoint_of_fsdp2_goes_on_as_plain_training_does(name: str, from_fsdp2: Path) -> None:
    assert continue_both_ways(str(from_fsdp2), name) == []


@pytest.mark.parametrize(
    ("world_size", "fields"), [(1, {"compute_dtype": "bf16"}), (2, {"stage": 1}), (3, {"compute_dtype": "fp16"})]
)
def test_a_checkpoint_of_fsdp2_is_taken_over_by_any_ranks(
    world_size: int, fields: dict[str, Any], from_fsdp2: Path
) -> None:
    assert run_ranks(load_and_compare, world_size, str(from_fsdp2), "nested", fields) == [[]] * world_size


@pytest.mark.parametrize(("world_size", "fields"), [(1, {}), (2, {"compute_dtype": "bf16"}), (2, {"stage": 0})])
def test_fsdp2_goes_on_from_ours_and_so_do_we(world_size: int, fields: dict[str, Any], tmp_path: Path) -> None:
    assert run_ranks(save_for_fsdp2, world_size, str(tmp_path), fields) == [[]] * world_size
    assert run_ranks(load_and_compare, 3 - world_size, str(tmp_path), "ours", fields) == [[]] * (3 - world_size)
