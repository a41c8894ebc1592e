"""`zerooffload export` of what a run left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from support.folders import leftovers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder with a tokenizer, generation settings, and a vocabulary of letters."""
    folder = tmp_path / "source"
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    special = dict.fromkeys(("unk_token", "eos_token"), "?")
    tokenizer = Tokenizer(models.WordLevel(letters, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(4)
    sizes = {"vocab_size": 28, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=27))
    model.generation_config.max_length = 77
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def left(recipe_file: Path, source: Path, run: Run, nvme: Path) -> Path:
    """What a run of two steps with bf16 left."""
    text = recipe_file.read_text()
    begin, end = text.index("[model.config]"), text.index("[data]")
    recipe_file.write_text(text[:begin] + f'[model]\nname = "{source}"\n' + text[end:])
    code, _, err = run("train", recipe_file, "--set", "offload.compute_dtype=bf16")
    assert (code, err) == (0, "")
    return nvme


def test_a_run_becomes_a_folder_and_goes_on(run: Run, left: Path, source: Path, tmp_path: Path) -> None:
    code, out, err = run("export", left, tmp_path / "out", "--dtype", "fp32")
    assert (code, err) == (0, "")
    assert f"model of step 2 written to {tmp_path / 'out'}" in out.replace("\n", "")
    assert leftovers(left) == []
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.float32
    assert loaded.generation_config.max_length == 77
    assert loaded.config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a?")["input_ids"] == [0, 27]
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, tensor in loaded.state_dict().items():
        # Two steps of AdamW at a rate of 1e-4, with its default weight decay.
        assert 0 < (tensor - before[name]).abs().max() < 3e-4, name
    # A second export is the same, and the run goes on as if there had been none.
    assert run("export", left, tmp_path / "again", "--dtype", "fp32")[0] == 0
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert run("resume", left, "--set", "training.steps=3", "--report", tmp_path / "report.json")[0] == 0
    assert len(json.loads((tmp_path / "report.json").read_text())["losses"]) == 1


def test_the_run_after_an_export_has_the_losses_of_one_without(
    run: Run, left: Path, recipe_file: Path, tmp_path: Path
) -> None:
    assert run("export", left, tmp_path / "out")[0] == 0
    assert run("resume", left, "--set", "training.steps=4", "--report", tmp_path / "resumed.json")[0] == 0
    settings = ["offload.compute_dtype=bf16", "training.steps=4", "offload.overwrite=true"]
    given = [text for setting in settings for text in ("--set", setting)]
    assert run("train", recipe_file, *given, "--report", tmp_path / "whole.json")[0] == 0
    resumed, whole = (json.loads((tmp_path / name).read_text())["losses"] for name in ("resumed.json", "whole.json"))
    assert resumed == whole[2:]


def test_a_checkpoint_becomes_the_same_folder(run: Run, left: Path, recipe_file: Path, tmp_path: Path) -> None:
    """Of a run whose steps are committed nowhere."""
    checkpoints = tmp_path / "checkpoints"
    settings = [f"checkpoint.directory={checkpoints}", "checkpoint.every_steps=5", "offload.compute_dtype=bf16"]
    settings += [f"offload.{state}=host" for state in ("params", "optimizer", "gradients")]
    given = [text for setting in settings for text in ("--set", setting)]
    code, _, err = run("train", recipe_file, *given)
    assert (code, err) == (0, "")
    code, out, err = run("export", checkpoints, tmp_path / "saved", "--dtype", "fp32")
    assert (code, err) == (0, "")
    assert "model of step 2" in out
    assert run("export", left, tmp_path / "committed", "--dtype", "fp32")[0] == 0
    saved, committed = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "committed"))
    assert saved.keys() == committed.keys()
    assert all(torch.equal(tensor, committed[name]) for name, tensor in saved.items())


def test_weights_are_of_the_dtype_that_is_wanted(run: Run, left: Path, tmp_path: Path) -> None:
    for options, dtype in (([], torch.bfloat16), (["--dtype", "fp16"], torch.float16)):
        assert run("export", left, tmp_path / "out", "--overwrite", *options)[0] == 0
        tensors = load_file(tmp_path / "out" / "model.safetensors").values()
        assert {tensor.dtype for tensor in tensors} == {dtype}


def test_what_cannot_be_is_told(run: Run, left: Path, source: Path, tmp_path: Path) -> None:
    code, _, err = run("export", left, source)
    assert code == 2
    assert "holds files" in err
    assert run("export", left, source, "--overwrite")[0] == 0
    (tmp_path / "empty").mkdir()
    code, _, err = run("export", tmp_path / "empty", tmp_path / "out")
    assert code == 2
    assert "holds no run that finished a step" in err
