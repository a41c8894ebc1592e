"""Saving and loading take no more memory than training."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.peak_of_saves import BUDGET_BYTES, peaks, state_bytes
from support.ranks import run_ranks


def load_alone(rank: int, world_size: int, folder: str) -> dict[str, int]:
    return peaks(rank, world_size, folder, loads=True)


def train_and_save(rank: int, world_size: int, folder: str) -> dict[str, int]:
    return peaks(rank, world_size, folder, loads=False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_peak_is_that_of_training(num_ranks: int, tmp_path: Path) -> None:
    """To a twentieth, for a model whose states exceed the budgets five times."""
    assert state_bytes() >= 5 * BUDGET_BYTES
    trained = run_ranks(train_and_save, num_ranks, str(tmp_path))
    loaded = run_ranks(load_alone, num_ranks, str(tmp_path))
    for of_training, of_loading in zip(trained, loaded, strict=True):
        most = 1.05 * of_training["training"]
        found = {**of_training, "load in a process of its own": of_loading["load"]}
        assert {what: peak for what, peak in found.items() if peak > most} == {}
