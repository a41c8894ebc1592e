"""Recipes whose "auto" a plan fills in, by the profile that is remembered of a machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.paper import machine

import zerooffload as zo
from zerooffload.train import planning
from zerooffload.train.planning import planned
from zerooffload.train.recipe import recipe_from

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerooffload.planner.profiles import MachineProfile
    from zerooffload.train.recipe import Recipe

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
STATES = 16 * (8 * (4 * 512 * 512 + 3 * 512 * 1024) + 8192 * 512)
"""Bytes, but for norms."""


def recipe(**offload: Any) -> Recipe:
    return recipe_from(
        {
            "model": {"config": LLAMA},
            "data": {"path": "none"},
            "offload": offload,
            "training": {"steps": 1, "batch_size": 4, "sequence_length": 32},
        }
    )


def of_memory(nbytes: int) -> MachineProfile:
    paper = machine(shares_host=True)
    return paper.model_copy(update={"host": paper.host.model_copy(update={"memory": nbytes})})


@pytest.fixture
def remember(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`remember(profile)`: what is known of this machine."""

    def call(profile: MachineProfile | None, foreign: str = "") -> None:
        remembered = profile and SimpleNamespace(profile=profile, foreign=foreign, stale="")
        monkeypatch.setattr(planning, "remembered_machine", lambda: remembered)

    return call


def test_without_a_profile_a_recipe_stays_as_it_is(remember: Callable[..., None]) -> None:
    remember(None)
    given = recipe()
    assert planned(given) is given
    remember(of_memory(8 * STATES), foreign="it is another machine's")
    assert planned(given) is given


def test_homes_that_a_recipe_names_stay(remember: Callable[..., None]) -> None:
    remember(of_memory(8 * STATES))
    given = recipe(params="host", optimizer="host", gradients="host")
    assert planned(given) is given


def test_units_that_no_pattern_matches_are_planned(remember: Callable[..., None], tmp_path: Path) -> None:
    remember(of_memory(STATES))
    some = {"model.layers.0": "nvme"}
    given = recipe(nvme_paths=[str(tmp_path)], params="nvme", gradients="nvme", optimizer=some)
    offload = planned(given).offload
    assert isinstance(offload.optimizer, str) or "*" in offload.optimizer
    assert not offload.leaves_homes_open


def test_what_fits_is_on_host(remember: Callable[..., None], tmp_path: Path) -> None:
    remember(of_memory(8 * STATES))
    offload = planned(recipe(nvme_paths=[str(tmp_path)])).offload
    assert (offload.params, offload.optimizer, offload.gradients) == ("host", "host", "host")
    assert offload.host_memory == 6 * STATES
    assert offload.nvme_paths == (tmp_path,)


def test_what_does_not_fit_is_on_the_recipes_drive(remember: Callable[..., None], tmp_path: Path) -> None:
    remember(of_memory(STATES))
    offload = planned(recipe(nvme_paths=[str(tmp_path)], optimizer="nvme", threads=1)).offload
    assert (offload.optimizer, offload.threads) == ("nvme", 1)
    assert not offload.leaves_homes_open


def test_a_drive_that_the_recipe_does_not_name_is_not_used(remember: Callable[..., None]) -> None:
    remember(of_memory(STATES))
    with pytest.raises(zo.BudgetError, match="nvme_paths, a folder on a drive"):
        planned(recipe())


def test_a_drive_that_was_not_measured_is_taken_for_a_typical_one(
    remember: Callable[..., None], tmp_path: Path
) -> None:
    remember(of_memory(STATES).model_copy(update={"drives": ()}))
    assert not planned(recipe(nvme_paths=[str(tmp_path)])).offload.leaves_homes_open


def test_a_slice_size_is_planned(remember: Callable[..., None]) -> None:
    remember(of_memory(8 * STATES))
    assert planned(recipe(micro_batch_size="auto")).offload.micro_batch_size in {None, 1, 2}
    remember(None)
    with pytest.raises(zo.ConfigError, match="run zerooffload calibrate, or give a number"):
        planned(recipe(micro_batch_size="auto"))


def test_several_machines_are_not_planned_for(remember: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    remember(of_memory(8 * STATES))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    given = recipe()
    assert planned(given) is given
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert planned(given).offload.host_memory == 6 * STATES // 4
