"""Frozen parameters that all ranks hold whole on host are there once: the same bits, and the memory of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_sharing import MostlyFrozen, edit_one_after_the_other, lose_a_rank, train_with_and_without
from support.ranks import run_ranks, started_ranks

from zerooffload.accelerator import host_buffer_nbytes, shared_part_nbytes

WORLD_SIZE = 3
NAMED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at
_LIMIT_SECONDS = 50


@pytest.mark.parametrize("stage", [0, 2])
def test_the_memory_of_one_and_the_same_bits(stage: int, tmp_path: Path) -> None:
    ranks = run_ranks(train_with_and_without, WORLD_SIZE, str(tmp_path), stage, limit_seconds=_LIMIT_SECONDS)
    for shared, own in ranks:
        assert shared["losses"] == own["losses"]
        for name, value in own["params"].items():
            assert torch.equal(shared["params"][name], value), name
        whole = sum(host_buffer_nbytes(nbytes) for nbytes in shared["frozen"])
        assert shared["resident"] == whole
        assert own["resident"] == 0
        # Each rank counts its part.
        parts = sum(shared_part_nbytes(nbytes, WORLD_SIZE) for nbytes in shared["frozen"])
        assert own["leased"]["host"] - shared["leased"]["host"] == whole - parts
        assert whole <= WORLD_SIZE * parts < whole + WORLD_SIZE * len(shared["frozen"]) * 4096
    # What the kernel counts for each, whole KiB rounded down, is that of one together.
    together = sum(shared["own_part"] for shared, _ in ranks)
    assert whole - WORLD_SIZE * 1024 <= together <= whole


def test_nothing_shards_them_where_the_stage_does(tmp_path: Path) -> None:
    for shared, own in run_ranks(train_with_and_without, 2, str(tmp_path), 3, limit_seconds=_LIMIT_SECONDS):
        assert shared["resident"] == own["resident"] == 0
        assert shared["leased"] == own["leased"]


def test_an_edit_is_made_once(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = 2 * MostlyFrozen().embed.weight.detach()
    for edited in run_ranks(edit_one_after_the_other, 2, str(tmp_path), limit_seconds=_LIMIT_SECONDS):
        assert torch.equal(edited, expected)


def test_a_rank_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    before = sorted(NAMED_MEMORY.iterdir())
    with started_ranks(lose_a_rank, 2, str(tmp_path)) as ranks:
        endings = dict(ranks.endings(_LIMIT_SECONDS))
    assert endings[1].died
    told, resident = endings[0].value
    assert "rank 1 is gone" in told
    assert resident == 0
    assert sorted(NAMED_MEMORY.iterdir()) == before
