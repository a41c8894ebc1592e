"""The power goes for two ranks: both resume at the newest step that both hold, and all of it is there, to the bit.

What the drives hold is looked at for every cut; from every so many of them both ranks are resumed and train on. With
ZEROOFFLOAD_TEST_EXHAUSTIVE=1 from all of them, and in more kinds of training.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.drive_images import Image, systematic_images
from support.durable_training import ALL_ON_NVME, Reference, Scenario, differences, train_ranks_uninterrupted
from support.power_cuts import any_image, check_step, folder_with
from support.rank_power_cuts import (
    WORLD_SIZE,
    Checksums,
    Held,
    Holdings,
    Pairs,
    RankResumptions,
    agreed_step,
    all_pairs,
    continue_ranks,
    moments_of,
    noting_checksums,
    of_machines,
    recorded_ranks,
    resume_and_finish,
)
from support.ranks import run_ranks
from support.thoroughness import EXHAUSTIVE, one_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVERYTHING = {**ALL_ON_NVME, "gradients": "nvme"}
WIDTH = 72
"""Of a model of which the second rank has something in every unit."""
SHORT = {
    "fp32": Scenario(width=WIDTH),
    "nothing but padding on a rank": Scenario(),
    "bf16, gradients on nvme": Scenario(width=WIDTH, config={**EVERYTHING, "compute_dtype": "bf16"}),
    "fp16 with a skipped step": Scenario(
        num_batches=4, width=WIDTH, overflows=(2,), config={**ALL_ON_NVME, "compute_dtype": "fp16"}
    ),
    "durable, on host": Scenario(width=WIDTH, config={"params": "host", "optimizer": "host", "durable": True}),
    "two paths": Scenario(width=WIDTH, num_paths=2),
    "edits after steps": Scenario(width=WIDTH, edits=True, config={**ALL_ON_NVME, "compute_dtype": "bf16"}),
}
QUICK = [kind for kind in SHORT if EXHAUSTIVE or kind not in {"bf16, gradients on nvme", "two paths", "fp32"}]
LONG = Scenario(
    num_batches=8, width=104, num_blocks=3, overflows=(2, 5), config={**EVERYTHING, "compute_dtype": "fp16"}
)


Uninterrupted = tuple[list[Reference], Checksums]


@pytest.fixture(scope="module")
def uninterrupted(memory_folder: Path) -> Callable[[str], Uninterrupted]:
    """A scenario of `SHORT` on two ranks, and what their chunks hold after each step; made once."""

    @cache
    def trained(kind: str) -> Uninterrupted:
        with noting_checksums() as checksums:
            return train_ranks_uninterrupted(SHORT[kind], memory_folder / f"ranks, {kind}", WORLD_SIZE), checksums

    return trained


@pytest.fixture
def begin(uninterrupted: Callable[[str], Uninterrupted], scratch: Path) -> Callable[..., Any]:
    """What looks at images of a scenario, by rank, and what resumes from them."""

    def made(kind: str, *, apart: bool) -> tuple[list[Holdings], RankResumptions]:
        references, checksums = uninterrupted(kind)
        resumptions = RankResumptions(SHORT[kind], references, scratch, apart=apart)
        return holdings_of(SHORT[kind], checksums, scratch), resumptions

    return made


def holdings_of(scenario: Scenario, checksums: Checksums, scratch: Path) -> list[Holdings]:
    return [Holdings(scenario, rank, of_rank, scratch) for rank, of_rank in enumerate(checksums)]


@pytest.mark.parametrize("kind", SHORT if EXHAUSTIVE else ["fp32"])
def test_one_machine_at_any_moment(kind: str, begin: Callable[..., Any], scratch: Path) -> None:
    """Both ranks' files are as they were at that moment, but for what no flush covered."""
    holdings, resumptions = begin(kind, apart=False)
    (log,) = recorded_ranks(SHORT[kind], scratch / "recorded", apart=False)
    steps: dict[bytes, int] = {}
    for drive in log.drives():
        for image in systematic_images(drive, thoroughly=EXHAUSTIVE):
            step = agreed_step(*(of.of(image) for of in holdings))
            check_step(step, drive.committed, drive.finished)
            if image.key not in steps and not len(steps) % one_in(60):
                assert resumptions.step_of(image) == step
            steps[image.key] = step
    assert set(steps.values()) == set(range(len(resumptions.reference.moments)))


@pytest.mark.parametrize("kind", QUICK)
def test_two_machines_at_moments_of_their_own(kind: str, begin: Callable[..., Any], scratch: Path) -> None:
    check_all_pairs(kind, begin, scratch, in_background=False)


@pytest.mark.parametrize("kind", SHORT if EXHAUSTIVE else ["edits after steps"])
def test_two_machines_whose_ranks_commit_in_the_background(kind: str, begin: Callable[..., Any], scratch: Path) -> None:
    check_all_pairs(kind, begin, scratch, in_background=True)


def check_all_pairs(kind: str, begin: Callable[..., Any], scratch: Path, *, in_background: bool) -> None:
    holdings, resumptions = begin(kind, apart=True)
    logs = recorded_ranks(SHORT[kind], scratch / "recorded", apart=True, in_background=in_background)
    pairs = all_pairs(logs, holdings)
    assert set(pairs.steps.values()) == set(range(len(resumptions.reference.moments)))
    # One may hold a step that the other does not.
    assert any(newest_of(one) != newest_of(other) for one, other in pairs.steps)
    check_by_resuming(pairs, holdings, resumptions)


def check_by_resuming(pairs: Pairs, holdings: list[Holdings], resumptions: RankResumptions) -> None:
    """From every so many of what two machines may hold at once."""
    for pair, step in list(pairs.steps.items())[:: one_in(6)]:
        assert resumptions.step_of(images_of(pair, holdings)) == step


def test_two_machines_that_lose_any_subset_of_writes(
    scratch: Path, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    references = train_ranks_uninterrupted(LONG, memory_folder / "ranks, long", WORLD_SIZE)
    resumptions = RankResumptions(LONG, references, scratch, apart=True)
    logs = recorded_ranks(LONG, scratch / "recorded", apart=True)
    first, second = (moments_of(log) for log in logs)
    # The start is gone through above.
    begins = next(number for number, moment in enumerate(first) if moment.committed)

    @settings(max_examples=300 if EXHAUSTIVE else 12, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=True))
    def any_cut(choice: random.Random) -> None:
        one = choice.randrange(begins, len(first))
        other = choice.choice([at for at, moment in enumerate(second) if first[one].may_be_with(moment)])
        images = [any_image(log.drive_after(at), choice) for log, at in zip(logs, (one, other), strict=True)]
        committed = min(first[one].committed, second[other].committed)
        finished = max(first[one].finished, second[other].finished)
        check_step(resumptions.step_of(of_machines(images)), committed, finished)

    any_cut()


@pytest.mark.parametrize("ahead", range(WORLD_SIZE))
def test_cut_again_while_resuming_and_after(
    ahead: int, begin: Callable[..., Any], uninterrupted: Callable[[str], Uninterrupted], scratch: Path
) -> None:
    """From drives of which one holds a step that the other does not; it is done again, and comes out otherwise.

    What the one held must never count beside what the other holds later.
    """
    kind = "two paths"
    holdings, _ = begin(kind, apart=True)
    pairs = all_pairs(recorded_ranks(SHORT[kind], scratch / "recorded", apart=True), holdings)
    pair = next(pair for pair, step in pairs.steps.items() if step == 1 and newest_of(pair[ahead]) == 2)
    assert newest_of(pair[1 - ahead]) == 1
    references, checksums = uninterrupted(kind)
    other_way = replace(SHORT[kind], max_norm=0.02)
    image = images_of(pair, holdings)
    with folder_with(image, scratch) as folder, noting_checksums(checksums) as expected:
        references = continue_ranks(other_way, folder, references)
    assert [of_rank[2] for of_rank in expected] != [of_rank[2] for of_rank in checksums]
    with folder_with(image, scratch) as folder:
        logs = recorded_ranks(other_way, folder, apart=True, committed=1)
    holdings = holdings_of(other_way, expected, scratch)
    again = all_pairs(logs, holdings)
    assert set(again.steps.values()) == {1, 2, 3}
    check_by_resuming(again, holdings, RankResumptions(other_way, references, scratch, apart=True))


def test_ranks_in_processes_of_their_own(
    begin: Callable[..., Any], uninterrupted: Callable[[str], Uninterrupted], scratch: Path
) -> None:
    """They resume where threads do, and come to the same end."""
    kind = "bf16, gradients on nvme"
    holdings, _ = begin(kind, apart=True)
    pairs = all_pairs(recorded_ranks(SHORT[kind], scratch / "recorded", apart=True), holdings)
    apart = [pair for pair in pairs.steps if newest_of(pair[0]) != newest_of(pair[1])][:: one_in(3)]
    with ExitStack() as stack:
        folders = [stack.enter_context(folder_with(images_of(pair, holdings), scratch)) for pair in apart]
        endings = run_ranks(resume_and_finish, WORLD_SIZE, SHORT[kind], list(map(str, folders)))
    for reference, endings_of_rank in zip(uninterrupted(kind)[0], endings, strict=True):
        assert reference.last is not None
        for pair, ending in zip(apart, endings_of_rank, strict=True):
            assert ending["step"] == pairs.steps[pair]
            assert ending["losses"] == reference.losses[ending["step"] :]
            assert differences("params", ending["params"], reference.last.values["params"]) == []


def newest_of(held: Held) -> int:
    return max((step for _, step in held.steps), default=0)


def images_of(pair: tuple[Held, Held], holdings: list[Holdings]) -> Image:
    """One that holds this."""
    return of_machines([of.images[held] for of, held in zip(holdings, pair, strict=True)])
