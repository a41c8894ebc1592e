"""Models that torch's tensor parallelism has cut, with replicas of each part: equal to the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.rank_training import MAX_NORM, NUM_MICRO_STEPS, NUM_STEPS
from support.ranks import run_ranks
from support.tensor_parallel import Case, train_cut_models
from support.tensor_parallel_checks import check_apart, check_checkpoints

WORLD_SIZE = 4
CASES = [
    Case("plain norms", 3, ("nvme", "nvme", "nvme")),
    Case("plain norms", 0, ("host", "host", "host")),
    Case("plain norms", 1, ("nvme", "nvme", "host")),
    Case("sequence parallel", 2, ("host", "host", "host")),
    Case("sequence parallel", 3, ("host", "nvme", "host"), "under_next_forward"),
    Case("sequence parallel", 3, ("nvme", "nvme", "nvme"), "during_backward"),
    Case("distributed activations", 3, ("nvme", "host", "host")),
    Case("partly frozen, checkpointed", 3, ("nvme", "nvme", "nvme")),
    Case("sequence parallel", 3, ("nvme", "host", "host"), micro_batch_size=2),
    Case("tied", 3, ("nvme", "nvme", "host"), compute_dtype="bf16"),
    Case("tied", 0, ("host", "host", "host"), compute_dtype="bf16"),
]


def check(plain: dict[str, Any], offloaded: dict[str, Any], *, done: int = 0) -> None:
    """Losses, norms and parameters, to the bit."""
    assert all(norm > MAX_NORM for norm in plain["norms"])
    assert offloaded["losses"] == plain["losses"][done * NUM_MICRO_STEPS :]
    assert offloaded["norms"] == plain["norms"][done:]
    assert offloaded["params"].keys() == plain["params"].keys()
    for name, value in plain["params"].items():
        assert torch.equal(offloaded["params"][name], value), name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Of each rank and case; all in one set of processes, which is quick."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    return run_ranks(train_cut_models, WORLD_SIZE, str(folder), CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_a_cut_model_trains_as_it_does_in_plain_pytorch(number: int, results: list[list[dict[str, Any]]]) -> None:
    for of_rank in results:
        check(**of_rank[number])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found out about the rest; in one set of processes too."""
    return run_ranks(check_apart, WORLD_SIZE, str(tmp_path_factory.mktemp("apart")))


def test_each_element_counts_once_in_the_norm(found: list[dict[str, Any]]) -> None:
    """As the norm of all gradients put together: sums of doubles, rounded once to fp32, differ by one place at most."""
    for pairs in [of_rank["norms_of_whole_gradients"] for of_rank in found]:
        assert len(pairs) == 18
        for norm, expected in pairs:
            assert abs(norm - expected) <= np.spacing(np.float32(expected))


def test_norms_are_over_the_stages_of_a_pipeline_too(found: list[dict[str, Any]]) -> None:
    for order, norm, expected in [of_rank["norms_of_cut_stages"] for of_rank in found]:
        assert order == [0, 1, 2, 3]
        assert abs(norm - expected) <= np.spacing(np.float32(expected))


def test_a_part_that_overflows_skips_the_step_of_all(found: list[dict[str, Any]]) -> None:
    assert [of_rank["overflow_in_one_part"] for of_rank in found] == [(True, 1.0)] * WORLD_SIZE


def test_all_parts_resume_at_the_step_that_all_hold(found: list[dict[str, Any]]) -> None:
    for done, offloaded, plain in [of_rank["resume_cut_model"] for of_rank in found]:
        assert done == NUM_STEPS - 1
        check(plain, offloaded, done=done)


def test_a_rank_does_not_continue_another_part(found: list[dict[str, Any]]) -> None:
    for said in [of_rank["continue_as_another_part"] for of_rank in found]:
        assert "part was (1,), now it is (0,)" in said or "part was (0,), now it is (1,)" in said


def test_ordinary_calls_are_right_or_refused(found: list[dict[str, Any]]) -> None:
    for said in [of_rank["call_ordinary"] for of_rank in found]:
        assert said["state_dict"]
        assert said["load_state_dict"]
        for name in ("deepcopy", "pickle", "compile"):
            assert "does not work on an offloaded model" in said[name], name
        assert "An offloaded model stays as it is" in said["to"]
        for name in ("to_local", "full_tensor", "redistribute", "add"):
            assert "blocks.0.up.weight was used outside of the model's forward" in said[name], name
        assert said["edit"] == 0.0
        assert said["gradients"] == []
        assert said["new gradient"] == [1.0]
        assert ["modified" in error for error in said["stale"]] == [True, True]


def test_optimizer_states_are_those_of_torch(found: list[dict[str, Any]]) -> None:
    for said in [of_rank["exchange_optimizer_states"] for of_rank in found]:
        assert all(said["same"])
        assert said["torch takes it"]
        assert "exp_avg is a plain tensor, expected a DTensor (Shard(dim=0),)" in said["plain"]
        assert "exp_avg is a DTensor (Replicate(),)" in said["moved"]


def test_what_cannot_be_offloaded_is_refused_on_every_rank(found: list[dict[str, Any]]) -> None:
    for said in [of_rank["refused"] for of_rank in found]:
        for name in ("no group", "same group"):
            assert 'zo.offload(model, process_group=mesh["dp"])' in said[name]
        assert "pipeline_group" in said["pipeline"]
        assert "hand in the model without it" in said["fully sharded"]
        assert "of 2 dimensions" in said["two dimensions"]
        assert "cut over several meshes" in said["two meshes"]
        assert "still to be made" in said["partial"]
        assert "expected [4, 8]: cut it with Shard" in said["uneven"]
        assert "model.to_empty" in said["meta"]
        assert "DTensor of TwoTensors" in said["subclass"]
        assert "module blocks.0 is cut and compiled" in said["compiled"]
        assert "load them before parallelize_module" in said["weights"]
        assert "hooks, weak references or a graph" in said["hook"]
        assert "hooks, weak references or a graph" in said["hook of a node"]
        assert "unit blocks.0 gets a DTensor" in said["activations"]
        assert "has cut the head" in said["sliced loss"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found out about checkpoints."""
    return run_ranks(check_checkpoints, WORLD_SIZE, str(tmp_path_factory.mktemp("saved")))


def test_a_checkpoint_goes_into_other_cuts_and_back(saved: list[dict[str, Any]]) -> None:
    """Of two parts into four and one, whose checkpoints two parts continue as if nothing had been."""
    for of_rank in [of_rank["save_and_load"] for of_rank in saved]:
        assert of_rank["differing"] == []
        assert len(of_rank["continued"]) == 3
        for each in of_rank["continued"]:
            check(**each, done=2)


def test_a_checkpoint_goes_into_a_whole_model_and_back(saved: list[dict[str, Any]]) -> None:
    """8-bit moments are rounded to the blocks of each cut."""
    for of_rank in [of_rank["load_into_whole_model"] for of_rank in saved]:
        assert len(of_rank) == 6
        assert all(differing == [] for differing in of_rank.values()), of_rank


def test_cut_stages_with_the_same_names_are_not_saved(saved: list[dict[str, Any]]) -> None:
    for of_rank in saved:
        said = of_rank["save_cut_stages"]
        assert "two stages of the pipeline have a parameter" in said["zo.save"]
        for name in ("zo.save_dcp", "zo.export_safetensors"):
            assert f"{name} cannot join the stages of a pipeline" in said[name]
