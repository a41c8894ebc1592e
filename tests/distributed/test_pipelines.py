"""Pipelines of torch's whose stages are offloaded, with replicas of each: equal to the whole model in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipelines import (
    PipelineCase,
    losses,
    overflow_in_one_stage,
    refused,
    resume_pipeline,
    train_pipelines,
    whole_model,
)
from support.rank_emulation import EmulatedRanks
from support.rank_training import MAX_NORM, NUM_STEPS, OPTIONS
from support.ranks import run_ranks

WORLD_SIZE = 4
CASES = [
    PipelineCase("GPipe", 2, 3, ("nvme", "nvme", "nvme")),
    PipelineCase("GPipe", 2, 0, ("host", "host", "host")),
    PipelineCase("GPipe", 4, 3, ("nvme", "host", "host")),
    PipelineCase("1F1B", 2, 1, ("nvme", "nvme", "host")),
    PipelineCase("1F1B", 2, 2, ("host", "host", "host")),
    PipelineCase("1F1B", 2, 3, ("host", "nvme", "host"), "under_next_forward"),
    PipelineCase("1F1B", 2, 3, ("nvme", "nvme", "nvme"), "during_backward"),
]


@cache
def in_one_process(num_stages: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and parameters of the whole model, with as many replicas as a pipeline of so many stages has."""
    num_replicas = WORLD_SIZE // num_stages
    plain = EmulatedRanks(whole_model(), num_replicas, **OPTIONS)
    norms = []
    for step in range(NUM_STEPS):
        for of_replicas in losses(step, num_replicas):
            plain.micro_step(of_replicas)
        norms.append(plain.clip(MAX_NORM))
        plain.step()
    return norms, plain.params()


def check(result: dict[str, Any], num_stages: int, *, done: int = 0) -> None:
    norms, params = in_one_process(num_stages)
    assert result["norms"] == norms[done:]
    assert len(result["params"]) == len(params) // num_stages
    for name, value in result["params"].items():
        assert torch.equal(value, params[name]), name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Of each rank and case; all in one set of processes, which is quick."""
    folder = tmp_path_factory.mktemp("pipelines")
    return run_ranks(train_pipelines, WORLD_SIZE, str(folder), CASES, limit_seconds=60)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_a_pipeline_trains_like_the_whole_model(number: int, results: list[list[dict[str, Any]]]) -> None:
    for of_rank in results:
        check(of_rank[number], CASES[number].num_stages)


def test_a_stage_that_overflows_skips_the_step_of_all(tmp_path: Path) -> None:
    assert run_ranks(overflow_in_one_stage, WORLD_SIZE, str(tmp_path)) == [(True, 1.0)] * WORLD_SIZE


def test_all_stages_resume_at_the_step_that_all_hold(tmp_path: Path) -> None:
    for done, result in run_ranks(resume_pipeline, WORLD_SIZE, str(tmp_path)):
        assert done == NUM_STEPS - 1
        check(result, 2, done=done)


def test_what_makes_no_pipeline_is_refused_on_every_rank() -> None:
    for rank, messages in enumerate(run_ranks(refused, WORLD_SIZE)):
        without_group, same_groups, two_dimensions, other_units = messages
        assert "pipeline_group without process_group" in without_group
        assert "a rank trains one stage" in same_groups
        assert "mesh[name]" in two_dimensions
        assert ("planning failed on another rank" in other_units) == (rank < 2)
        assert "units=['0'] matches no module" in other_units
