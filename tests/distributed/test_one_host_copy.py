"""Parameters that all ranks hold whole on host are there once: the same bits, and the memory of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.rank_resume import NUM_STEPS
from support.rank_sharing import (
    Case,
    MostlyFrozen,
    edit_beside_a_save,
    edit_one_after_the_other,
    lose_a_rank,
    resume_on_one_copy,
    save_beside_training_and_load,
    train_in_the_least_window,
    train_with_and_without,
    update_in_turn,
)
from support.ranks import run_ranks, started_ranks
from support.thoroughness import EXHAUSTIVE, one_in

from zerooffload.accelerator import host_buffer_nbytes, shared_part_nbytes

WORLD_SIZE = 3
_LIMIT_SECONDS = 50


@pytest.mark.parametrize("stage", [0, 1, 2] if EXHAUSTIVE else [2])
def test_the_memory_of_one_and_the_same_bits(stage: int, tmp_path: Path) -> None:
    """Frozen parameters in every stage; trained ones where each rank updates a part of them."""
    ranks = run_ranks(train_with_and_without, WORLD_SIZE, str(tmp_path), stage, limit_seconds=_LIMIT_SECONDS)
    for shared, own in ranks:
        assert shared["losses"] == own["losses"]
        for name, value in own["params"].items():
            assert torch.equal(shared["params"][name], value), name
        whole = sum(host_buffer_nbytes(nbytes) for nbytes in shared["whole"])
        assert shared["resident"] == whole
        assert own["resident"] == 0
        # Each rank counts its part.
        parts = sum(shared_part_nbytes(nbytes, WORLD_SIZE) for nbytes in shared["whole"])
        assert own["leased"]["host"] - shared["leased"]["host"] == whole - parts
        assert whole <= WORLD_SIZE * parts < whole + WORLD_SIZE * len(shared["whole"]) * 4096
    # What the kernel counts for each, whole KiB rounded down, is that of one together.
    together = sum(shared["own_part"] for shared, _ in ranks)
    assert whole - WORLD_SIZE * 1024 <= together <= whole


def test_nothing_shards_them_where_the_stage_does(tmp_path: Path) -> None:
    for shared, own in run_ranks(train_with_and_without, 2, str(tmp_path), 3, limit_seconds=_LIMIT_SECONDS):
        assert shared["resident"] == own["resident"] == 0
        assert shared["leased"] == own["leased"]


CASES = [
    Case(2, "under_next_forward"),
    Case(1, "during_backward"),
    Case(2, "during_backward", fields={"compute_dtype": "bf16", "accumulation_steps": 2}),
    Case(1, "under_next_forward", fields={"durable": True}),
    Case(1, "after_backward"),
    Case(2, "under_next_forward", optimizer="nvme"),
    Case(2, "after_backward"),
    Case(2, "during_backward"),
    Case(1, "under_next_forward"),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_bits_while_units_come_and_go(world_size: int, tmp_path: Path) -> None:
    cases = CASES[world_size % one_in(2) :: one_in(2 if world_size == 2 else 4)]
    wrong = run_ranks(train_in_the_least_window, world_size, str(tmp_path), cases)
    assert wrong == [[]] * world_size


def test_each_replica_has_a_copy(tmp_path: Path) -> None:
    cases = [Case(2, "under_next_forward", num_replicas=2)]
    assert run_ranks(train_in_the_least_window, 4, str(tmp_path), cases) == [[]] * 4


def test_each_rank_updates_and_reads_in_its_turn(tmp_path: Path) -> None:
    ranks = run_ranks(update_in_turn, 2, str(tmp_path))
    for losses in ranks:
        assert losses["after_backward"] == losses["under_next_forward"] == losses["own"]
        assert losses["late"] == losses["own, late"]
    # Rank 1 would see rank 0's next step.
    assert ranks[1]["not in turn"] != ranks[1]["own"]


def test_an_edit_is_made_once(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model, names = MostlyFrozen(), ["embed", "blocks.1.down"]
    for found in run_ranks(edit_one_after_the_other, 2, str(tmp_path), names):
        for name, (seen, edited) in zip(names, found, strict=True):
            expected = model.get_parameter(f"{name}.weight").detach()
            assert torch.equal(seen, expected)
            assert torch.equal(edited, 2 * expected)


def test_an_edit_waits_for_the_saves_of_all(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = MostlyFrozen().embed.weight.detach()
    for saved in run_ranks(edit_beside_a_save, 2, str(tmp_path)):
        assert torch.equal(saved, expected)


def test_what_was_committed_is_resumed(tmp_path: Path) -> None:
    results = run_ranks(resume_on_one_copy, 2, str(tmp_path), (2, 1))
    assert results == [{"resumed": NUM_STEPS - 1, "again": NUM_STEPS}] * 2


def test_what_was_saved_beside_the_training_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(save_beside_training_and_load, 2, str(tmp_path)) == [[], []]


def named_memory() -> set[Path]:
    """Of all processes, but for semaphores, which come and go with other tests."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}  # noqa: S108 - looked at


@pytest.mark.parametrize("in_update", [False, True])
def test_a_rank_that_is_killed_leaves_nothing(tmp_path: Path, *, in_update: bool) -> None:
    before = named_memory()
    with started_ranks(partial(lose_a_rank, in_update=in_update), 2, str(tmp_path)) as ranks:
        endings = dict(ranks.endings(_LIMIT_SECONDS))
    assert endings[1].died
    told, resident = endings[0].value
    assert "rank 1 is gone" in told
    assert resident == 0
    assert named_memory() <= before
