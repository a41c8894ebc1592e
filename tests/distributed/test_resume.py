"""Ranks whose newest records differ go on together, from the step that all of them hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.rank_resume import NUM_STEPS, train_damage_resume
from support.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("damage", "damaged_rank", "expected"),
    [
        ("none", 0, NUM_STEPS),
        ("torn", 0, NUM_STEPS - 1),
        ("removed", 1, NUM_STEPS - 1),
        ("zeros", 1, NUM_STEPS - 1),
    ],
)
def test_both_ranks_resume_at_the_step_that_both_hold(
    damage: str, damaged_rank: int, expected: int, tmp_path: Path
) -> None:
    results = run_ranks(train_damage_resume, 2, str(tmp_path), damage, damaged_rank)
    assert results == [{"resumed": expected, "again": NUM_STEPS}] * 2
