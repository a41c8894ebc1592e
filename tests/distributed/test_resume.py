"""Ranks whose newest records differ go on together, from the step that all of them hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.rank_resume import NUM_STEPS, Setup, refused_to_resume, resume_on_devices, train_damage_resume
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
    results = run_ranks(train_damage_resume, 2, str(tmp_path), damage, damaged_rank, Setup())
    assert results == [{"resumed": expected, "again": NUM_STEPS}] * 2


ALL_ON_NVME = ("nvme", "nvme", "host")
IN_MEMORY = ("host", "device", "host")
SETUPS = [
    *(Setup(ALL_ON_NVME, stages) for stages in ((0, 0), (1, 1), (3, 2))),
    *(Setup(IN_MEMORY, stages, durable=True) for stages in ((0, 0), (1, 1), (2, 3))),
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.homes[0]}-{setup.stages[0]}-{setup.stages[1]}")
def test_every_stage_is_resumed(setup: Setup, tmp_path: Path) -> None:
    """Also in another stage, if a rank updates the same shards there."""
    results = run_ranks(train_damage_resume, 2, str(tmp_path), "torn", 1, setup)
    assert results == [{"resumed": NUM_STEPS - 1, "again": NUM_STEPS}] * 2


def test_what_is_in_memory_is_resumed_beside_a_device(tmp_path: Path) -> None:
    setup = Setup(IN_MEMORY, durable=True)
    results = run_ranks(resume_on_devices, 2, str(tmp_path), setup)
    assert results == [{"resumed": NUM_STEPS - 1, "again": NUM_STEPS}] * 2


def test_replicas_are_resumed_together(tmp_path: Path) -> None:
    setup = Setup(ALL_ON_NVME, (2, 2), num_replicas=2)
    results = run_ranks(train_damage_resume, 4, str(tmp_path), "torn", 3, setup)
    assert results == [{"resumed": NUM_STEPS - 1, "again": NUM_STEPS}] * 4


def test_a_run_of_stage_0_is_of_that_stage_alone(tmp_path: Path) -> None:
    for message in run_ranks(refused_to_resume, 2, str(tmp_path), Setup(ALL_ON_NVME, (0, 2))):
        assert "cannot continue it" in message
        assert "the stage was another one" in message
