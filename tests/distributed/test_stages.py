"""ZeRO's stages: the same numbers to the bit, whatever is sharded, on every combination of tiers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from support.environments import COMBINATIONS, PAIRWISE, Homes
from support.folders import leftovers
from support.rank_stages import STAGES, edit_in_stages, train_in_stages, train_in_stages_on_devices, train_without
from support.ranks import run_ranks
from support.thoroughness import EXHAUSTIVE

from zerooffload.telemetry import Wait

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("stage", STAGES[:3])
def test_the_bits_of_stage_3_on_all_tiers(stage: int, tmp_path: Path) -> None:
    cases = [(stage, homes) for homes in (COMBINATIONS if EXHAUSTIVE else PAIRWISE)]
    assert run_ranks(train_in_stages, 2, str(tmp_path), cases) == [[], []]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_bits_of_stage_3_on_more_ranks(world_size: int, tmp_path: Path) -> None:
    cases = [(STAGES[number % 3], homes) for number, homes in enumerate(PAIRWISE) if number % 2 == world_size % 2]
    assert run_ranks(train_in_stages, world_size, str(tmp_path), cases) == [[]] * world_size


@pytest.mark.parametrize("stage", [1, 2])
def test_the_bits_of_stage_3_on_devices_with_memory_of_their_own(stage: int, tmp_path: Path) -> None:
    # Gradients do not live there: with several ranks they would be brought down and up again.
    cases = [(stage, homes) for homes in PAIRWISE if homes[2] != "device"]
    train = partial(train_in_stages_on_devices, together=False)
    assert run_ranks(train, 2, str(tmp_path), cases) == [[], []]


FIELDS: list[dict[str, Any]] = [
    {"compute_dtype": "bf16", "accumulation_steps": 2, "update": "during_backward"},
    {"compute_dtype": "bf16", "update": "under_next_forward", "moments": "8bit"},
    {"update": "under_next_forward", "durable": True},
]
HOMES: list[Homes] = [("nvme", "nvme", "host"), ("host", "nvme", "host"), ("host", "host", "nvme")]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("on_devices", [False, True])
def test_the_bits_of_stage_3_with_other_settings(fields: dict[str, Any], tmp_path: Path, *, on_devices: bool) -> None:
    cases = [(stage, homes) for stage, homes in zip((0, 1, 2, 1, 2, 3), 2 * HOMES, strict=True)]
    train = train_in_stages_on_devices if on_devices else train_in_stages
    assert run_ranks(partial(train, fields=fields), 2, str(tmp_path), cases) == [[], []]


WAITS = [
    ("fetch.take_copies_home", Wait.PARAMETER_GATHERED, ("host", "host", "host")),
    ("fetch._write_staged", Wait.PARAMETER_GATHERED, ("nvme", "host", "host")),
    ("fetch._write_staged", Wait.PARAMETER_COPY, ("nvme", "host", "host")),
    ("fetch.wait_for_copies", Wait.PARAMETER_WRITE, ("nvme", "host", "host")),
]
"""Those of parameters that other ranks update, on their way home."""


@pytest.mark.parametrize(("place", "wait", "homes"), WAITS)
def test_without_a_wait_the_numbers_are_wrong(place: str, wait: Wait, homes: Homes, tmp_path: Path) -> None:
    for wrong, times in run_ranks(train_without, 2, str(tmp_path), (2, homes), (place, wait)):
        assert times > 0
        assert wrong != []


def test_what_is_seen_and_edited_is_the_same(tmp_path: Path) -> None:
    homes: list[Homes] = [("host", "host", "host"), ("nvme", "nvme", "nvme")]
    cases = [(stage, of_states) for stage in STAGES for of_states in homes]
    assert run_ranks(edit_in_stages, 2, str(tmp_path), cases) == [[], []]
