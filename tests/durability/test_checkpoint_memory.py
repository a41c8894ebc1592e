"""Saving, loading and importing take no more memory than training."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.peak_of_saves import BUDGET_BYTES, peaks, state_bytes, write_deepspeed
from support.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_peak_is_that_of_training(num_ranks: int, tmp_path: Path) -> None:
    """To a twentieth, for a model whose states exceed the budgets five times."""
    assert state_bytes() >= 5 * BUDGET_BYTES
    write_deepspeed(tmp_path / "deepspeed")
    trained = run_ranks(partial(peaks, loads=""), num_ranks, str(tmp_path))
    loaded = [run_ranks(partial(peaks, loads=what), num_ranks, str(tmp_path)) for what in ("checkpoints", "deepspeed")]
    for of_training, *of_loading in zip(trained, *loaded, strict=True):
        most = 1.05 * of_training["training"]
        found = {**of_training, **of_loading[0], **of_loading[1]}
        assert {what: peak for what, peak in found.items() if peak > most} == {}
