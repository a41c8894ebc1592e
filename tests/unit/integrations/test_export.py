from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, load_model
from support.compatible_models import quantized_with_lora, with_lora
from support.folders import leftovers
from support.small_models import batch, branching, small_gpt2, small_llama, small_mixtral
from support.stored_weights import read_weights
from torch import nn
from transformers import AutoModelForCausalLM

import zerooffload as zo
from zerooffload import BudgetError, CheckpointError, ConfigError
from zerooffload.checkpoint import weights_writer
from zerooffload.runtime import weight_export

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
HOMES = {"host": {}, "device": {"params": "device", "optimizer": "host"}, "nvme": NVME}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is several chunks, and a chunk several pieces."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    monkeypatch.setattr(weight_export, "_PIECE_NUMEL", 1000)


@contextmanager
def offloaded(model: nn.Module, tmp_path: Path, **fields: Any) -> Iterator[nn.Module]:
    nvme = tmp_path / "nvme"
    nvme.mkdir(exist_ok=True)
    limits = {"host_memory": "64MiB", "nvme_space": "64MiB", "threads": 1}
    zo.offload(model, zo.OffloadConfig(nvme_paths=[nvme], **{**limits, **fields}))
    try:
        yield model
    finally:
        zo.close(model)


def train(model: nn.Module, num_steps: int = 2) -> None:
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        tokens = batch(step, 0)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def generated(model: nn.Module) -> list[list[int]]:
    prompt = batch(9, 0)[:, :4]
    mask = torch.ones_like(prompt)
    model.eval()
    tokens: Any = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    return tokens.tolist()


def with_adapters_of(base: nn.Module, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        # peft asks transformers 5 by old names.
        warnings.simplefilter("ignore")
        model: nn.Module = PeftModel.from_pretrained(base, folder)
    return model.eval()


def untied() -> nn.Module:
    return small_llama(tied=False)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20kB"])
@pytest.mark.parametrize("build", [small_llama, untied, small_gpt2, small_mixtral])
def test_the_files_are_those_of_transformers(
    build: Callable[[], nn.Module], max_shard_size: str, tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path / "theirs")
    with offloaded(build(), tmp_path, **NVME) as model:
        zo.export_safetensors(model, tmp_path / "ours", max_shard_size=max_shard_size)
    assert_same(read_weights(tmp_path / "ours"), read_weights(tmp_path / "theirs"))
    assert (tmp_path / "ours" / "model.safetensors").exists() is (max_shard_size == "5GB")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


@pytest.mark.parametrize(
    ("build", "homes"),
    [
        *((build, "nvme") for build in (small_llama, untied, small_mixtral)),
        (small_gpt2, "host"),
        (small_llama, "device"),
    ],
)
def test_a_trained_model_is_loaded_as_it_was(build: Callable[[], nn.Module], homes: str, tmp_path: Path) -> None:
    with offloaded(build(), tmp_path, **HOMES[homes]) as model:
        train(model)
        zo.export_safetensors(model, tmp_path / "out")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_same(loaded.state_dict(), dict(model.state_dict()))
        assert generated(loaded) == generated(model)


@pytest.mark.parametrize("mode", ["under_next_forward", "during_backward"])
def test_an_update_that_is_hidden_is_waited_for(mode: Any, tmp_path: Path) -> None:
    with offloaded(small_llama(), tmp_path, update=mode, **NVME) as model:
        train(model)
        zo.export_safetensors(model, tmp_path / "out")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_same(loaded.state_dict(), dict(model.state_dict()))


def test_training_goes_on_as_if_nothing_had_been_exported(tmp_path: Path) -> None:
    states = []
    for exports in (False, True):
        with offloaded(small_llama(), tmp_path, **NVME, overwrite=True) as model:
            train(model, 1)
            if exports:
                zo.export_safetensors(model, tmp_path / "out")
            train(model, 1)
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert_same(states[1], states[0])


@pytest.mark.parametrize("homes", [{}, NVME, {"optimizer": "nvme"}, {"params": "nvme"}])
def test_the_least_budget_in_which_it_trains_is_enough(homes: dict[str, str], tmp_path: Path) -> None:
    too_little, enough = 0, 1 << 22
    while enough - too_little > 1:
        tried = (too_little + enough) // 2
        limits = {"host_memory": tried, "device_memory": tried}
        try:
            with offloaded(small_llama(), tmp_path, **homes, **limits, compute_dtype="bf16"):
                enough = tried
        except BudgetError:
            too_little = tried
    limits = {"host_memory": enough, "device_memory": enough}
    with offloaded(small_llama(), tmp_path, **homes, **limits, compute_dtype="bf16") as model:
        train(model, 1)
        zo.export_safetensors(model, tmp_path / "out", dtype=torch.float32)


@pytest.mark.parametrize("compute_dtype", ["bf16", "fp16"])
def test_fp32_gives_the_masters(compute_dtype: Any, tmp_path: Path) -> None:
    """What was put in comes out, to the bit, though the model computes in 16 bits."""
    expected = {name: tensor.clone() for name, tensor in untied().state_dict().items()}
    with offloaded(untied(), tmp_path, compute_dtype=compute_dtype, **NVME) as model:
        zo.export_safetensors(model, tmp_path / "fp32", dtype=torch.float32)
        zo.export_safetensors(model, tmp_path / "own")
        own = dict(model.state_dict())
    assert_same(load_file(tmp_path / "fp32" / "model.safetensors"), expected)
    assert_same(load_file(tmp_path / "own" / "model.safetensors"), own)
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["dtype"] == "float32"
    assert (
        json.loads((tmp_path / "own" / "config.json").read_text())["dtype"]
        == {
            "bf16": "bfloat16",
            "fp16": "float16",
        }[compute_dtype]
    )


def test_another_dtype_is_rounded_once_from_the_master(tmp_path: Path) -> None:
    expected = {name: tensor.half() for name, tensor in untied().state_dict().items()}
    with offloaded(untied(), tmp_path, compute_dtype="bf16") as model:
        zo.export_safetensors(model, tmp_path / "out", dtype=torch.float16)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_values_that_fp16_has_not_are_refused(tmp_path: Path) -> None:
    model = untied()
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = 70000
    with offloaded(model, tmp_path), pytest.raises(ConfigError, match=r"model\.norm\.weight has values beyond"):
        zo.export_safetensors(model, tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["nvme"]


def test_a_plain_module_is_loaded_by_the_safetensors_library(tmp_path: Path) -> None:
    """With a frozen parameter, a 0-dim one, a tied one, and buffers of which one is not saved."""
    model = branching()
    model.register_buffer("counts", torch.arange(5))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offloaded(model, tmp_path, **NVME):
        zo.export_safetensors(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert expected.keys() - found.keys() == {"head.weight"}
    assert_same({**found, "head.weight": found["embed.weight"]}, expected)
    other = branching()
    other.register_buffer("counts", torch.zeros(5, dtype=torch.int64))
    assert load_model(other, tmp_path / "out" / "model.safetensors") == (set(), [])


def test_a_part_of_a_model_is_exported_alone(tmp_path: Path) -> None:
    with offloaded(small_llama(), tmp_path) as model:
        block = model.get_submodule("model.layers.1")
        zo.export_safetensors(block, tmp_path / "out")
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), dict(block.state_dict()))


def test_weights_that_nobody_ties_again_are_there_under_each_name(tmp_path: Path) -> None:
    model = untied()
    model.get_submodule("model.layers.1").mlp.up_proj.weight = model.get_submodule("model.layers.0").mlp.up_proj.weight
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offloaded(model, tmp_path):
        zo.export_safetensors(model, tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), expected)


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    with_lora(small_llama()).save_pretrained(tmp_path / "theirs")
    with offloaded(with_lora(small_llama()), tmp_path, **NVME) as model:
        zo.export_safetensors(model, tmp_path / "ours")
        train(model)
        zo.export_safetensors(model, tmp_path / "trained")
        trained = dict(model.state_dict())
        model.eval()
        logits = model(input_ids=batch(0, 0)).logits
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("ours", "trained")]
    assert names == [["adapter_config.json", "adapter_model.safetensors"]] * 2
    ours, theirs = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert_same(ours, theirs)
    configs = [json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("ours", "theirs")]
    assert configs[0] == configs[1]
    loaded = with_adapters_of(small_llama(), tmp_path / "trained")
    assert_same(dict(loaded.state_dict()), trained)
    assert torch.equal(loaded(input_ids=batch(0, 0)).logits, logits)


def test_the_model_below_adapters_comes_out_as_it_went_in(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path / "theirs")
    with offloaded(_with_saved_modules(small_llama()), tmp_path, **NVME) as model:
        train(model)
        zo.export_safetensors(model, tmp_path / "ours", base_model=True)
        model.eval()
        logits = model(input_ids=batch(0, 0)).logits
    assert_same(read_weights(tmp_path / "ours"), read_weights(tmp_path / "theirs"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    loaded = with_adapters_of(base, tmp_path / "ours" / "adapter")
    assert torch.equal(loaded(input_ids=batch(0, 0)).logits, logits)


def _with_saved_modules(base: nn.Module) -> nn.Module:
    """Adapters, and norms that are trained as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)
        model: nn.Module = get_peft_model(base, config)
    return model


def test_several_adapters_have_a_folder_each(tmp_path: Path) -> None:
    model: Any = with_lora(small_llama())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    second = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["second"].weight.detach().clone()
    with offloaded(model, tmp_path):
        zo.export_safetensors(model, tmp_path / "out")
    found = load_file(tmp_path / "out" / "second" / "adapter_model.safetensors")
    assert torch.equal(found["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], second)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "second",
    ]


def test_adapters_on_quantized_weights_are_exported_alone(tmp_path: Path) -> None:
    with offloaded(quantized_with_lora(), tmp_path) as model:
        zo.export_safetensors(model, tmp_path / "out")
        with pytest.raises(ConfigError, match=r"is a EightBits.*export adapters alone"):
            zo.export_safetensors(model, tmp_path / "whole", base_model=True)
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 12
    assert not (tmp_path / "whole").exists()


def test_a_layout_that_cannot_be_cut_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading  # noqa: PLC0415 - since transformers 5

    monkeypatch.setattr(
        core_model_loading,
        "revert_weight_conversion",
        lambda _, named: {name: tensor.t().contiguous() for name, tensor in named.items()},
    )
    with offloaded(small_llama(), tmp_path) as model, pytest.raises(ConfigError, match="cannot be written piece by"):
        zo.export_safetensors(model, tmp_path / "out")


def test_a_drive_that_keeps_something_else_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all = weights_writer._write_all

    def last_byte_lost(fd: int, view: memoryview, offset: int) -> None:
        write_all(fd, view[:-1], offset)

    with offloaded(small_llama(), tmp_path, **NVME) as model:
        monkeypatch.setattr(weights_writer, "_write_all", last_byte_lost)
        with pytest.raises(CheckpointError, match="other bytes than were written"):
            zo.export_safetensors(model, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["nvme"]
        monkeypatch.undo()
        zo.export_safetensors(model, tmp_path / "out")
    assert leftovers(tmp_path / "nvme") == []


class WithState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("build", "fields", "message"),
    [
        (small_llama, {"dtype": torch.int8}, "dtype must be"),
        (small_llama, {"max_shard_size": "many"}, "max_shard_size"),
        (small_llama, {"max_shard_size": 0}, "more than 0"),
        (lambda: WithState(4, 4), {}, "extra state"),
    ],
)
def test_what_cannot_be_is_refused(
    build: Callable[[], nn.Module], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with offloaded(build(), tmp_path) as model, pytest.raises(ConfigError, match=message):
        zo.export_safetensors(model, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_offloaded_or_is_in_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not offloaded"):
        zo.export_safetensors(small_llama(), tmp_path / "out")
    in_use = pytest.raises(ConfigError, match="in use")
    with offloaded(small_llama(), tmp_path) as model, in_use, zo.full_params(model):
        zo.export_safetensors(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["nvme"]
