from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerooffload import ConfigError
from zerooffload.machine import cache_folder
from zerooffload.train.recipe import read_recipe, recipe_from

MINIMAL = '[model]\nname = "owner/model"\n[data]\npath = "text.txt"\n[training]\nsteps = 3\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL)
    return file


def test_a_minimal_recipe_has_defaults(file: Path) -> None:
    recipe = read_recipe(file)
    assert (recipe.model.name, recipe.data.path, recipe.training.steps) == ("owner/model", Path("text.txt"), 3)
    assert recipe.offload.params == "auto"
    assert recipe.training.tokens_per_step == 1024


def test_settings_are_replaced_by_toml_values(file: Path) -> None:
    recipe = read_recipe(
        file,
        [
            "training.steps=5",
            "optimizer.betas=[0.8, 0.9]",
            'offload.optimizer={"layers.*" = "nvme"}',
            "offload.nvme_paths=/mnt/a b",
            "model.gradient_checkpointing=true",
            "schedule.kind=cosine",
        ],
    )
    assert (recipe.training.steps, recipe.optimizer.betas) == (5, (0.8, 0.9))
    assert recipe.offload.optimizer == {"layers.*": "nvme"}
    assert recipe.offload.nvme_paths == (Path("/mnt/a b"),)
    assert (recipe.model.gradient_checkpointing, recipe.schedule.kind) == (True, "cosine")


@pytest.mark.parametrize("override", ["training.steps", "steps=5", "=5", ".steps=5", "training.=5"])
def test_an_override_of_another_form_is_refused(file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        read_recipe(file, [override])


@pytest.mark.parametrize("override", ["training.steps.more=1", "training.steps=1\nseed=2"])
def test_an_override_cannot_do_something_else(file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="steps"):
        read_recipe(file, [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.stesp=1", ["training.stesp", "did you mean training.steps?"]),
        ("trainign.steps=1", ["[trainign]", "did you mean training?"]),
        ("offload.hots_memory=1", ["offload.hots_memory", "did you mean offload.host_memory?"]),
        ("optimizer.learning_rate=1", ["optimizer.learning_rate", "Known are: name, lr"]),
    ],
)
def test_an_unknown_key_is_named_with_the_closest_known(file: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(file, [override])
    for word in [str(file), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.steps=0", ["training.steps", "0"]),
        ("training.batch_size=many", ["training.batch_size", "'many'"]),
        ("training.max_grad_norm=0.0", ["training.max_grad_norm"]),
        ("schedule.kind=square", ["schedule.kind", "'square'"]),
        ("offload.params=nvme", ["[offload]", "nvme_paths is empty"]),
        ("offload.host_memory=12", ["host_memory"]),
        ("optimizer.lr=-1.0", ["optimizer.lr", "-1.0"]),
        ("optimizer.momentum=0.9", ["adamw has no setting momentum"]),
        ("offload.algorithm=lion", ["algorithm is lion", "name is adamw"]),
        (
            "offload.accumulation_steps=2",
            ["accumulation_steps is 2", "accumulation_steps is 1", "leave the former out"],
        ),
        ("offload.accumulation_steps=0", ["[offload]", "accumulation_steps", "0"]),
        ('model.config={model_type="llama"}', ["either name", "or config"]),
    ],
)
def test_a_wrong_value_is_named(file: Path, override: str, words: list[str]) -> None:
    if override == "offload.host_memory=12":
        override = 'offload.host_memory="12"'
    with pytest.raises(ConfigError) as caught:
        read_recipe(file, [override])
    for word in words:
        assert word in str(caught.value)


def test_the_offload_config_is_told_how_many_backwards_a_step_has(file: Path) -> None:
    assert read_recipe(file).placement.accumulation_steps == 1
    recipe = read_recipe(file, ["training.accumulation_steps=4"])
    assert recipe.placement.accumulation_steps == 4
    # What is recorded with a run, and may be changed when it is continued, is what the user wrote.
    assert "accumulation_steps" not in recipe.model_dump(exclude_unset=True)["offload"]
    both = ["training.accumulation_steps=4", "offload.accumulation_steps=4"]
    assert read_recipe(file, both).placement == recipe.placement


@pytest.mark.parametrize("text", [None, "steps = ", "model = 3\n[data]\n[training]\n", "[model]\n"])
def test_a_file_that_is_missing_broken_or_incomplete_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        read_recipe(file)


def test_paths_are_expanded(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = recipe_from(
        {
            **values,
            "data": {"path": "~/text.txt"},
            "offload": {"nvme_paths": ["{cache}/nvme", "~/nvme"]},
            "model": {"name": "{cache}/model"},
        }
    )
    assert recipe.data.path == tmp_path / "text.txt"
    assert recipe.offload.nvme_paths == (cache_folder() / "nvme", tmp_path / "nvme")
    assert recipe.model.name == str(cache_folder() / "model")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "zerooffload"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "zerooffload"
