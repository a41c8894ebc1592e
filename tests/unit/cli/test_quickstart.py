from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.folders import leftovers

from zerooffload import ConfigError
from zerooffload.integrations.huggingface import ModelSource, random_model, smollm2
from zerooffload.train.recipe import read_recipe

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def quickstart(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """Run the example; its exit code."""
    monkeypatch.setattr("sys.argv", ["quickstart.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    return ended.value.code


def test_its_recipe_is_what_was_promised() -> None:
    recipe = read_recipe(EXAMPLES / "quickstart.toml")
    offload, training = recipe.offload, recipe.training
    assert (offload.params, offload.optimizer, offload.compute_dtype) == ("nvme", "nvme", "fp32")
    # Well under the states: 134,515,008 parameters with gradients and two moments of 4 bytes each.
    assert offload.host_memory is not None
    assert offload.host_memory <= 134_515_008 * 16 / 2
    assert (training.steps, training.batch_size, training.sequence_length) == (12, 2, 128)
    assert (training.evaluation_windows, training.accumulation_steps) == (4, 1)


def test_it_trains_a_model_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    random_model(ModelSource(config=TINY)).save_pretrained(tmp_path / "model")
    settings = ["model.tokenizer=bytes", "training.steps=2", "training.sequence_length=16", "offload.threads=1"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    report = tmp_path / "report.json"
    code = quickstart(monkeypatch, tmp_path / "model", "--work", tmp_path / "work", "--report", report, *overrides)
    assert code == 0
    assert json.loads(report.read_text())["steps"] == 2
    assert leftovers(tmp_path / "work" / "nvme") == []
    out = capsys.readouterr().out
    assert f"nvme tier: {tmp_path / 'work' / 'nvme'}" in out
    assert "held-out loss after training" in out


def test_it_can_make_the_models_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr("zerooffload.integrations.huggingface.prepare_smollm2", made.append)
    assert quickstart(monkeypatch, "--prepare-only", "--out", tmp_path / "out") is None
    assert made == [tmp_path / "out"]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_had_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("could not fetch it")

    monkeypatch.setattr(smollm2, "_gguf_file", refuse)
    assert quickstart(monkeypatch, "--prepare-only", "--out", tmp_path / "out") == "error: could not fetch it"
