"""A rank that dies or stops: the others end with an error that names it, and nothing stays locked."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dying import Fate, offload_in_folders, train_under
from support.folders import leftovers
from support.ranks import StartedRanks, run_ranks, started_ranks

import zerooffload as zo
from zerooffload.tiers.directory import RunDirectory

PHASES = ("start-up", "forward", "backward", "clipping", "step")
NUM_DEATHS = 4
"""In each phase."""
TIMEOUT_SECONDS = 10.0
"""Of the process group: what joins or waits for a dead rank ends by then."""
LIMIT_SECONDS = 2 * TIMEOUT_SECONDS
NUM_STEPS = 2


@cache
def events(world_size: int, folder: Path) -> dict[int, list[tuple[str, str]]]:
    """Phase and kind of what each rank does in a run in which nobody dies."""
    with started_ranks(train_under, world_size, str(folder), None, TIMEOUT_SECONDS, NUM_STEPS, join=False) as ranks:
        each = {rank: ending.value for rank, ending in ranks.endings(LIMIT_SECONDS)}
    assert all(value["ending"] == ["", ""] for value in each.values())
    return {rank: value["events"] for rank, value in each.items()}


def survivors(ranks: StartedRanks, victim: int) -> Iterator[Any]:
    """How the others end; within the limit."""
    others = set(range(len(ranks.processes))) - {victim}
    for rank, ending in ranks.endings(LIMIT_SECONDS, others):
        assert not ending.died, f"rank {rank} died too"
        assert not ending.error, ending.error
        yield ending.value["ending"]


def assert_free(folder: Path, world_size: int, victim: int) -> None:
    """Only the dead rank may have left more than committed steps, and the next run takes its place over."""
    assert [name for name in leftovers(folder / "zerooffload") if f"rank-{victim:05d}" not in name] == []
    for rank in range(world_size):
        RunDirectory(folder, rank).close()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", range(NUM_DEATHS))
def test_others_name_the_rank_that_died(
    phase: str, number: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(f"{phase} {number}")  # noqa: S311 - the same moments every time
    world_size = draw.choice([2, 3])
    victim = draw.randrange(world_size)
    of_victim = events(world_size, tmp_path_factory.getbasetemp())[victim]
    # Without rank 0, which holds torch's store, torch looks for it longer than its timeout.
    event = draw.choice([i for i, (of, what) in enumerate(of_victim) if of == phase and (victim, what) != (0, "join")])
    fate = Fate(victim, event)
    exchanged = next(position for position, (_, what) in enumerate(of_victim) if what == "exchange of values")
    arguments = (str(tmp_path), fate, TIMEOUT_SECONDS, NUM_STEPS)
    with started_ranks(train_under, world_size, *arguments, join=False) as ranks:
        for kind, message in survivors(ranks, victim):
            if event > exchanged:
                assert kind == "RankError"
                assert f"rank {victim} is gone" in message
            else:
                # Before the ranks knew each other's processes.
                assert kind in {"RankError", "DistBackendError", "DistStoreError", "DistNetworkError", "RuntimeError"}
        ranks.processes[victim].join()
        assert ranks.processes[victim].exitcode == -signal.SIGKILL
    assert_free(tmp_path, world_size, victim)


def test_a_rank_that_dies_as_start_up_ends(tmp_path: Path) -> None:
    """The others have made their files by then, and are about to hear that all have."""
    of_victim = events(2, tmp_path)[1]
    event = max(position for position, of in enumerate(of_victim) if of == ("start-up", "exchange of values"))
    arguments = (str(tmp_path), Fate(1, event), TIMEOUT_SECONDS, NUM_STEPS)
    with started_ranks(train_under, 2, *arguments, join=False) as ranks:
        assert [kind for kind, _ in survivors(ranks, 1)] == ["RankError"]
    assert_free(tmp_path, 2, 1)


def test_start_up_that_fails_on_one_rank_leaves_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    (found, error), (_, cause) = run_ranks(offload_in_folders, 2, [str(good), str(bad)])
    assert "opening the nvme paths failed on another rank" in error
    assert "is not a folder" in error
    assert "is not a folder" in cause
    assert found == []


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_is_killed_while_it_trains(victim: int, tmp_path: Path) -> None:
    arguments = (str(tmp_path), None, TIMEOUT_SECONDS, 1_000_000)
    with started_ranks(train_under, 3, *arguments, join=False) as ranks:
        while not (tmp_path / f"trains-{victim}").exists():
            time.sleep(0.01)
            assert all(process.is_alive() for process in ranks.processes)
        time.sleep(random.Random(victim).uniform(0.0, 0.2))  # noqa: S311 - any moment of a step
        os.kill(ranks.processes[victim].pid, signal.SIGKILL)
        for kind, message in survivors(ranks, victim):
            assert kind == "RankError"
            assert f"rank {victim} is gone" in message
    assert_free(tmp_path, 3, victim)


def test_a_rank_that_stops_ends_the_others_at_the_timeout(tmp_path: Path) -> None:
    timeout_seconds = 3.0
    of_victim = events(3, tmp_path)[1]
    event = next(position for position, (phase, _) in enumerate(of_victim) if phase == "backward")
    fate = Fate(1, event, signal.SIGSTOP)
    with started_ranks(train_under, 3, str(tmp_path), fate, timeout_seconds, NUM_STEPS, join=False) as ranks:
        for kind, message in survivors(ranks, 1):
            assert kind == "RankError"
            assert "a rank does not answer; none of this host's is gone" in message
    assert_free(tmp_path, 3, 1)


def test_world_size_without_a_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(zo.ConfigError, match="init_process_group"):
        zo.offload(torch.nn.Linear(2, 2))
