"""A training that is killed while it saves goes on from a checkpoint that was whole, and leaves nothing behind.

ZEROOFFLOAD_TEST_KILLED_SAVES sets how many kills there are (4 unless it does), a quarter of them of one of two ranks.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from support.killed import Kill, log_path
from support.killed_saves import KEPT, NUM_STEPS, checkpoints, train_and_save
from support.ranks import started_ranks

NUM_KILLS = int(os.environ.get("ZEROOFFLOAD_TEST_KILLED_SAVES", "4"))
LIMIT_SECONDS = 60.0


def attempt(folder: Path, num_ranks: int, kill: Kill | None = None) -> dict[int, Any]:
    """What each rank returned; those are missing that were killed, and that noticed that another was."""
    folder.mkdir(exist_ok=True)
    results = {}
    with started_ranks(train_and_save, num_ranks, str(folder), kill) as ranks:
        for rank, ending in ranks.endings(LIMIT_SECONDS):
            if ending.died:
                ranks.processes[rank].join()
                assert ranks.processes[rank].exitcode == -signal.SIGKILL
            elif ending.error:
                assert kill is not None
                assert "RankError" in ending.error
            else:
                results[rank] = ending.value
    return results


def saved_steps(folder: Path) -> list[int]:
    lines = log_path(folder, 0).read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("saved")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By the number of ranks, what rank 0 returned."""
    return {
        num_ranks: attempt(tmp_path_factory.mktemp("whole"), num_ranks)[0]
        for num_ranks in ((1, 2) if NUM_KILLS > 1 else (1,))
    }


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_the_checkpoint_before_is_there(seed: int, tmp_path: Path, uninterrupted: dict[int, Any]) -> None:
    draw = random.Random(seed)  # noqa: S311 - the same moments every time
    num_ranks = 2 if seed % 4 == 1 else 1
    whole = uninterrupted[num_ranks]
    moment = draw.choice(sorted(whole["moments"]))
    kill = Kill(moment, draw.randrange(whole["moments"][moment]), draw.randrange(num_ranks))
    attempt(tmp_path, num_ranks, kill)
    told = saved_steps(tmp_path)
    results = attempt(tmp_path, num_ranks)
    assert set(results) == set(range(num_ranks))
    digests = results[0]["digests"]
    assert min(digests) >= max(told, default=0)
    assert digests == {step: digest for step, digest in whole["digests"].items() if step in digests}
    assert max(digests) == NUM_STEPS
    left = sorted(path.name for path in checkpoints(tmp_path).iterdir())
    assert len(left) <= KEPT
    assert all(name.startswith("save-") for name in left)
