"""Several ranks write one folder, and it is that of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.exporting import NVME, export_in_stages, fail_on_one_rank, measure
from support.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

HOST = ("host", "host", "host")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_is_exported_whole(world_size: int, tmp_path: Path) -> None:
    cases = [(stage, NVME) for stage in (0, 1, 2, 3)] + [(3, HOST), (1, ("device", "nvme", "host"))]
    assert run_ranks(export_in_stages, world_size, str(tmp_path), cases) == [[]] * world_size


def test_replicas_write_once(tmp_path: Path) -> None:
    assert run_ranks(export_in_stages, 4, str(tmp_path), [(3, NVME)], 2) == [[]] * 4


def test_one_rank_that_fails_is_told_by_all_and_leaves_nothing(tmp_path: Path) -> None:
    (other, left), (failed, left_there) = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert failed.startswith("CheckpointError: cannot write")
    assert "No space left on device" in failed
    assert other.startswith("RankError: writing the weights failed on another rank: rank 1: CheckpointError")
    assert left == left_there == []
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_exports_and_exchange_take_no_more_memory_than_training(world_size: int, tmp_path: Path) -> None:
    for result in run_ranks(measure, world_size, str(tmp_path)):
        assert result["states"] > 5 * result["budget"]
        # What is written must be more than what would be tolerated.
        assert result["weights"] > 2 * 0.05 * result["trained"]
        for peak in ("exported", "saved", "loaded"):
            assert result[peak] <= 1.05 * result["trained"], result
