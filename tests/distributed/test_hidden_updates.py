"""Ranks whose updates are hidden: the same bits, and an end for all where one fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.environments import PAIRWISE
from support.folders import leftovers
from support.rank_hidden import HIDDEN_MODES, TIMEOUT_SECONDS, end_in_hidden_work, train_in_modes
from support.ranks import run_ranks, started_ranks
from support.thoroughness import one_in

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_SECONDS = 2 * TIMEOUT_SECONDS


def test_the_same_bits_in_every_mode(tmp_path: Path) -> None:
    homes = [homes for homes in PAIRWISE if "nvme" in homes]
    assert run_ranks(train_in_modes, 2, str(tmp_path), homes, one_in(3), limit_seconds=200) == [[], []]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("victim", range(2))
@pytest.mark.parametrize(
    ("tier", "update"), [("nvme", HIDDEN_MODES[0]), ("nvme", HIDDEN_MODES[1]), ("host", HIDDEN_MODES[0])]
)
def test_an_update_that_fails_on_one_rank_ends_the_other(tier: str, update: str, victim: int, tmp_path: Path) -> None:
    arguments = (str(tmp_path), tier, victim, update, "fails")
    with started_ranks(end_in_hidden_work, 2, *arguments, join=False) as ranks:
        endings = {rank: ending.value for rank, ending in ranks.endings(LIMIT_SECONDS)}
    kind, message = endings[victim]
    assert kind == "TierIOError"
    assert "the victim's drive" in message
    assert endings[1 - victim][0] == "RankError"


@pytest.mark.parametrize("victim", range(2))
@pytest.mark.parametrize("update", HIDDEN_MODES[:2])
def test_a_rank_that_is_killed_in_an_update_ends_the_other(update: str, victim: int, tmp_path: Path) -> None:
    arguments = (str(tmp_path), "nvme", victim, update, "killed")
    with started_ranks(end_in_hidden_work, 2, *arguments, join=False) as ranks:
        for rank, ending in ranks.endings(LIMIT_SECONDS):
            if rank == victim:
                assert ending.died
            else:
                assert ending.value[0] == "RankError"
                assert f"rank {victim} is gone" in ending.value[1]
