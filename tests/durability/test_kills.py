"""A training that is killed at random moments and continued gives the numbers of one that is not, bit for bit.

ZEROOFFLOAD_TEST_KILLS sets how many kills there are on one rank (8 unless it does), two in each training; and a quarter
as many on two ranks. With --log-file and --log-file-level=INFO pytest tells them.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.killed import NUM_STEPS, Kill, log_path, train
from support.ranks import started_ranks

_log = logging.getLogger(__name__)

NUM_KILLS = int(os.environ.get("ZEROOFFLOAD_TEST_KILLS", "8"))
LIMIT_SECONDS = 60.0
BY_CLOCK = "by the clock"


@dataclass
class Attempt:
    """One process of each rank, from its start to its end."""

    seconds: float = 0.0
    died: set[int] = field(default_factory=set)
    endings: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Uninterrupted:
    """A training that nobody kills: by rank, the log's losses, and what the process returned."""

    seconds: float
    losses: list[dict[int, list[str]]]
    endings: dict[int, Any]


def attempt(folder: Path, world_size: int = 1, kill: Kill | None = None) -> Attempt:
    """Start or continue a training; wait until every rank has ended."""
    began, result = time.monotonic(), Attempt()
    of_itself = kill if kill is not None and kill.moment != BY_CLOCK else None
    with started_ranks(train, world_size, str(folder), of_itself, join=False) as ranks:
        if kill is not None and of_itself is None:
            victim = ranks.processes[kill.rank]
            victim.join(kill.number / 1000)
            victim.kill()
        for rank, ending in ranks.endings(LIMIT_SECONDS):
            assert not ending.error, ending.error
            if ending.died:
                ranks.processes[rank].join()
                assert ranks.processes[rank].exitcode == -signal.SIGKILL
                result.died.add(rank)
            else:
                result.endings[rank] = ending.value
    result.seconds = time.monotonic() - began
    return result


def log_of(folder: Path, rank: int) -> list[list[str]]:
    path = log_path(folder, rank)
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def losses_of(folder: Path, rank: int) -> dict[int, list[str]]:
    """The losses, norm and learning rate of every step: the same in all attempts that came by it."""
    found: dict[int, list[str]] = {}
    for what, step, *values in log_of(folder, rank):
        if what == "loss":
            assert found.setdefault(int(step), values) == values, f"step {step} of rank {rank}, another time"
    return found


def assert_little_was_lost(folder: Path, rank: int) -> None:
    """At most the newest finished step and the one in progress, each time."""
    finished = 0
    for what, step, *_ in log_of(folder, rank):
        if what == "finished":
            finished = int(step)
        elif what == "resumed":
            assert finished - 1 <= int(step) <= finished
            finished = int(step)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bit for bit; of tensors in dictionaries."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def assert_nothing_shows(folder: Path, last: Attempt, expected: Uninterrupted) -> None:
    """The training that ended so was a whole one, whatever had happened to it."""
    for rank, ending in last.endings.items():
        assert ending["ending"] == ["", ""]
        assert_little_was_lost(folder, rank)
        assert losses_of(folder, rank) == expected.losses[rank]
        for name in ("params", "moments of parameters"):
            assert_same(ending[name], expected.endings[rank][name], name)
        if ending["next random number"] is not None:
            assert_same(ending["next random number"], expected.endings[rank]["next random number"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Uninterrupted]:
    """By world size; done once."""

    @cache
    def trained(world_size: int) -> Uninterrupted:
        folder = tmp_path_factory.mktemp("uninterrupted")
        done = attempt(folder, world_size)
        assert not done.died
        ranks = range(world_size)
        assert [done.endings[rank]["ending"] for rank in ranks] == [["", ""]] * world_size
        each = [losses_of(folder, rank) for rank in ranks]
        # Updates are hidden: their moments are among those at which it is killed.
        assert all("zerooffload-update" in done.endings[rank]["threads"] for rank in ranks)
        assert [list(steps) for steps in each] == [list(range(NUM_STEPS))] * world_size
        return Uninterrupted(done.seconds, each, done.endings)

    return trained


def draw_kill(draw: random.Random, whole: Uninterrupted, *, part: float = 1.0) -> Kill:
    """Some kind of moment, each kind as likely as any other, and one of those in the first `part` of a training."""
    rank = draw.randrange(len(whole.endings))
    counts = whole.endings[rank]["moments"]
    # By the clock ranks might be killed while they meet, of which torch says nothing useful.
    moment = draw.choice([*sorted(counts), *([BY_CLOCK] if len(whole.endings) == 1 else [])])
    number = int(1000 * whole.seconds) if moment == BY_CLOCK else counts[moment]
    return Kill(moment, draw.randrange(max(1, int(part * number))), rank)


@pytest.mark.parametrize("seed", range(NUM_KILLS // 2))
def test_a_training_that_was_killed_twice(
    seed: int, tmp_path: Path, uninterrupted: Callable[[int], Uninterrupted]
) -> None:
    draw = random.Random(seed)  # noqa: S311 - the same moments every time
    whole = uninterrupted(1)
    kills = [draw_kill(draw, whole), draw_kill(draw, whole, part=0.5)]
    for kill in kills:
        hit = attempt(tmp_path, kill=kill).died
        _log.info("%s number %d: %s", kill.moment, kill.number, "killed" if hit else "ended before")
    assert_nothing_shows(tmp_path, attempt(tmp_path), whole)


@pytest.mark.parametrize("seed", range(max(2, NUM_KILLS // 4)))
def test_two_ranks_of_which_one_is_killed(
    seed: int, tmp_path: Path, uninterrupted: Callable[[int], Uninterrupted]
) -> None:
    """The other ends with an error, and both go on from a step that both have."""
    draw = random.Random(seed)  # noqa: S311 - the same moments every time
    whole = uninterrupted(2)
    kill = draw_kill(draw, whole)
    hit = attempt(tmp_path, 2, kill)
    _log.info(
        "rank %d, %s number %d: %s", kill.rank, kill.moment, kill.number, "killed" if hit.died else "ended before"
    )
    if hit.died:
        (ending,) = (value["ending"] for value in hit.endings.values())
        assert ending[0] in {"RankError", ""}
    assert_nothing_shows(tmp_path, attempt(tmp_path, 2), whole)


@pytest.mark.parametrize(
    ("operation", "number", "rank"),
    [("read", 70, 0), ("write of states", 60, 1), ("write of record", 2, 0), ("flush of record", 4, 1)],
)
def test_two_ranks_of_which_one_has_a_fault(
    operation: str, number: int, rank: int, tmp_path: Path, uninterrupted: Callable[[int], Uninterrupted]
) -> None:
    """Nobody waits for ever, the other is told, and both go on from a step that both have."""
    fault = Kill(f"after a {operation}", number, rank, is_fault=True)
    hit = attempt(tmp_path, 2, fault)
    kinds = {of: ending["ending"][0] for of, ending in hit.endings.items()}
    assert kinds == {rank: "TierIOError", 1 - rank: "RankError"}
    assert_nothing_shows(tmp_path, attempt(tmp_path, 2), uninterrupted(2))


@pytest.mark.parametrize("victim", range(2))
def test_a_rank_that_is_killed_as_it_commits_the_first_step(
    victim: int, tmp_path: Path, uninterrupted: Callable[[int], Uninterrupted]
) -> None:
    """Its record is on the drive: the other, which ends without knowing, must not forget the run."""
    # A journal begins with two records.
    kill = Kill("before a flush of record", 2, victim)
    assert attempt(tmp_path, 2, kill).died == {victim}
    assert_nothing_shows(tmp_path, attempt(tmp_path, 2), uninterrupted(2))
