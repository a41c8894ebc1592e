from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from zerooffload import ConfigError
from zerooffload.integrations.huggingface import (
    ModelSource,
    build_model,
    model_config,
    random_model,
    resolve_folder,
    source_config,
)

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")


def test_random_weights_follow_the_seed_and_leave_random_numbers_alone(tiny_llama: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, again, other = (random_model(ModelSource(config=tiny_llama, seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    weights = [model.state_dict()["model.layers.0.mlp.up_proj.weight"] for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_config_file_is_a_source_too(tmp_path: Path, tiny_llama: dict[str, Any]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_llama))
    model = random_model(ModelSource(config=file))
    assert sum(param.numel() for param in model.parameters()) == sum(
        param.numel() for param in random_model(ModelSource(config=tiny_llama)).parameters()
    )


def test_other_families_are_built_as_well() -> None:
    fields = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    logits = random_model(ModelSource(config=fields))(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits
    assert logits.shape == (1, 4, 257)


def test_no_cache_is_kept_while_training(tiny_llama: dict[str, Any]) -> None:
    assert model_config(ModelSource(config=tiny_llama)).use_cache is False


def test_gradient_checkpointing_is_switched_on(tiny_llama: dict[str, Any]) -> None:
    model = build_model(ModelSource(config=tiny_llama, gradient_checkpointing=True))
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_folder(name)


def test_a_hub_name_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no-such-owner/no-such-model"):
        resolve_folder("no-such-owner/no-such-model")


def test_a_configuration_from_the_hub_comes_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama: dict[str, Any]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    asked = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert source_config(ModelSource(name="owner/model")).vocab_size == 257
    source_config(ModelSource(name="owner/model", trust_remote_code=True))
    assert asked == [("owner/model", ["config.json"]), ("owner/model", ["config.json", "*.py"])]


def test_an_unknown_model_type_is_told() -> None:
    with pytest.raises(ConfigError, match="configuration cannot be used"):
        model_config(ModelSource(config={"model_type": "no-such-type"}))


def test_code_of_a_model_is_not_run_unasked(tmp_path: Path, tiny_llama: dict[str, Any]) -> None:
    config = {**tiny_llama, "model_type": "own-type", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        model_config(ModelSource(name=str(tmp_path)))
