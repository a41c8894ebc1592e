"""Gradients that gather on ranks fit the least device memory with which a run begins, or it is told what is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.rank_gathering import train_in_little_and_ample_memory
from support.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

# Parameters of all of these outside of blocks are used before them and behind them, in some of them tied.
FITTING = ["Llama", "T5", "BERT", "ViT", "UNet"]


def test_the_least_that_a_plan_asks_for_is_enough(tmp_path: Path) -> None:
    assert run_ranks(train_in_little_and_ample_memory, 2, str(tmp_path), FITTING) == [[], []]


def test_where_blocks_come_in_another_order_in_each_step_it_is_told_what_is_enough(tmp_path: Path) -> None:
    for told in run_ranks(train_in_little_and_ample_memory, 2, str(tmp_path), ["branches"]):
        (error,) = told
        assert "gradient collection on the device: blocks.1/float32 needs 24.50 KiB, 0 B are free of 49.50 KiB" in error
        assert "(held by blocks.0/float32 24.50 KiB, embed/float32 16.50 KiB, (root)/float32 8.50 KiB)" in error
        assert "by 25088 bytes, or, for gradients in any order, by 50176" in error
