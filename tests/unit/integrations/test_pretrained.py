"""`zo.load_pretrained` gives what `from_pretrained` and `zo.offload` give, without the model in memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folders import leftovers
from support.small_models import small_gpt2, small_llama, small_mixtral
from support.stored_weights import assert_same_states, elements_read, save_folder, states_of
from torch import nn

import zerooffload as zo
from zerooffload import CheckpointError, ConfigError
from zerooffload.integrations.huggingface.conversion import _with_prefix

hf = pytest.importorskip("transformers")

ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96, "intermediate_size": 64}


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(21)
        return build()

    return made


def t5(*, tied: bool = True) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, tie_word_embeddings=tied))


def batch_norm() -> nn.Module:
    """Buffers that are saved."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    model = hf.ResNetForImageClassification(config)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape) + len(name))
    return model


def qwen_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 12}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIZES, **sizes, num_key_value_heads=1, num_experts_per_tok=2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: small_llama(tied=False),
    "llama, tied": small_llama,
    "llama, long": seeded(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rope_parameters=ROPE))),
    "llama, bf16": lambda: small_llama().to(torch.bfloat16),
    "gpt2": small_gpt2,
    "mixtral": small_mixtral,
    "mixtral, bf16": lambda: small_mixtral().to(torch.bfloat16),
    "qwen2 moe": seeded(qwen_moe),
    "t5": seeded(t5),
    "t5, untied": seeded(lambda: t5(tied=False)),
    "t5, fp16": seeded(lambda: t5().to(torch.float16)),
    "bert": seeded(lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES))),
    "vit": seeded(lambda: hf.ViTModel(hf.ViTConfig(**SIZES | {"image_size": 32, "patch_size": 8}))),
    "resnet": seeded(batch_norm),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    monkeypatch.setattr("zerooffload.runtime.initial_values._PIECE_NUMEL", 1000)


def saved(folder: Path, model: Any, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    return folder


def config(nvme: Path, **fields: Any) -> zo.OffloadConfig:
    homes = {"params": "nvme", "optimizer": "nvme", "gradients": "host"}
    bounds = {"host_memory": "64MiB", "nvme_space": "64MiB", "nvme_paths": [nvme], "threads": 1, "overwrite": True}
    return zo.OffloadConfig(**homes, **bounds, **fields)


def in_memory(folder: Path, kind: Any, settings: zo.OffloadConfig) -> dict[str, torch.Tensor]:
    """The states of the model that transformers loads."""
    return states_of(zo.offload(kind.from_pretrained(folder, dtype="auto"), settings))


@pytest.mark.parametrize("shard_size", ["50GB", "10KB"])
@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_it_is_the_model_that_transformers_loads(
    name: str, compute_dtype: str | None, shard_size: str, tmp_path: Path, nvme: Path
) -> None:
    original = MODELS[name]()
    folder = saved(tmp_path / "model", original, max_shard_size=shard_size)
    assert (folder / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    settings = config(nvme, compute_dtype=compute_dtype)
    expected = in_memory(folder, type(original), settings)
    state = torch.get_rng_state()
    model = zo.load_pretrained(folder, settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is type(original)
    assert model.training
    assert_same_states(states_of(model), expected)


def test_experts_are_read_into_their_packed_tensor(tmp_path: Path, nvme: Path) -> None:
    folder = saved(tmp_path / "model", small_mixtral())
    names = load_file(folder / "model.safetensors").keys()
    assert any(".experts.3.w1." in name for name in names)
    with elements_read() as ranges:
        zo.close(zo.load_pretrained(folder, config(nvme)))
    assert ranges.keys() == names


def test_saving_undoes_what_loading_did(tmp_path: Path, nvme: Path) -> None:
    folder = saved(tmp_path / "model", small_mixtral())
    model = zo.load_pretrained(folder, config(nvme))
    model.save_pretrained(tmp_path / "again")
    zo.close(model)
    first, second = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "again"))
    assert_same_states(first, second)


def test_the_base_of_a_model_and_the_reverse(tmp_path: Path, nvme: Path) -> None:
    """Names differ by the base model's prefix."""
    whole = small_gpt2()
    folder = saved(tmp_path / "model", whole)
    model = zo.load_pretrained(folder, config(nvme), model_class=hf.GPT2Model)
    assert_same_states(states_of(model), in_memory(folder, hf.GPT2Model, config(nvme)))
    base = saved(tmp_path / "base", whole.transformer)
    model = zo.load_pretrained(base, config(nvme), model_class=hf.AutoModelForCausalLM)
    assert_same_states(states_of(model), in_memory(base, hf.AutoModelForCausalLM, config(nvme)))


def test_old_names_and_useless_buffers_are_known(tmp_path: Path, nvme: Path) -> None:
    folder = saved(tmp_path / "model", MODELS["bert"]())
    tensors = load_file(folder / "model.safetensors")
    expected = states_of(zo.load_pretrained(folder, config(nvme)))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_states(states_of(zo.load_pretrained(folder, config(nvme))), expected)


def changed(folder: Path, change: dict[str, torch.Tensor | None]) -> Path:
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


GONE = {"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            GONE,
            r"2 weights of the model are missing: model.layers.1.mlp.up_proj.weight, model.norm.*strict=False",
        ),
        ({"extra": torch.ones(2)}, "1 tensors belong to no weight of the model: extra"),
        ({"model.norm.weight": torch.ones(33)}, r"model.norm.weight has shape \(33,\)"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, r"model.norm.weight is of torch.int32"),
    ],
)
def test_other_weights_are_refused(
    change: dict[str, torch.Tensor | None], words: str, tmp_path: Path, nvme: Path
) -> None:
    folder = changed(saved(tmp_path / "model", small_llama()), change)
    with elements_read() as ranges, pytest.raises(CheckpointError, match=words) as caught:
        zo.load_pretrained(folder, config(nvme))
    assert str(folder) in str(caught.value)
    assert not ranges
    assert list(nvme.iterdir()) == []


def test_missing_weights_are_new_where_that_is_wanted(
    tmp_path: Path, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = small_llama()
    folder = changed(saved(tmp_path / "model", original), {**GONE, "extra": torch.ones(2)})
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        model = zo.load_pretrained(folder, config(nvme), strict=False)
    told = " ".join(record.getMessage() for record in caplog.records)
    assert all(name in told for name in (*GONE, "extra"))
    with zo.full_params(model):
        params = dict(model.named_parameters())
        for name, param in original.named_parameters():
            assert torch.equal(params[name], param) == (name != "model.layers.1.mlp.up_proj.weight"), name
        new = params["model.layers.1.mlp.up_proj.weight"]
        # Of Llama's initialisation: normal, with the deviation that its configuration has. Five deviations of the mean.
        assert new.std().item() == pytest.approx(0.02, rel=5 / (2 * new.numel()) ** 0.5)
    zo.close(model)


def test_experts_that_do_not_fit_together_are_refused(tmp_path: Path, nvme: Path) -> None:
    folder = saved(tmp_path / "model", small_mixtral())
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    for tensor in (torch.ones(31, 32), torch.ones(32, 32, dtype=torch.bfloat16)):
        with pytest.raises(CheckpointError, match="do not fit together"):
            zo.load_pretrained(changed(folder, {name: tensor}), config(nvme))
    with pytest.raises(CheckpointError, match=r"do not fit together|has shape"):
        zo.load_pretrained(changed(folder, {name: None}), config(nvme))


def test_what_is_computed_on_the_way_is_refused(tmp_path: Path, nvme: Path) -> None:
    mapping = pytest.importorskip("transformers.conversion_mapping")
    loading = pytest.importorskip("transformers.core_model_loading")
    converter = loading.WeightConverter("up_proj.weight", "up_proj.weight", operations=[loading.Transpose()])
    folder = saved(tmp_path / "model", small_llama())
    mapping.register_checkpoint_conversion_mapping("llama", [converter])
    try:
        with pytest.raises(ConfigError, match=r"computes with this checkpoint's tensors.*transpose"):
            zo.load_pretrained(folder, config(nvme))
    finally:
        mapping._checkpoint_conversion_mapping_cache.pop("llama")
        mapping.USER_REGISTERED_MAPPINGS.discard("llama")


def test_quantized_weights_are_refused(tmp_path: Path, nvme: Path) -> None:
    folder = saved(tmp_path / "model", small_llama())
    fields = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": quantization}))
    with pytest.raises(ConfigError, match="quantized"):
        zo.load_pretrained(folder, config(nvme))


def test_code_of_a_model_is_not_run_unasked(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", small_llama())
    fields = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps({**fields, **own}))
    (folder / "own.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        zo.load_pretrained(folder)


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "own"

class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_code_of_a_model_is_run_if_asked(tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    original = small_llama()
    folder = saved(tmp_path / "model", original)
    fields = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps({**fields, **own}))
    (folder / "own.py").write_text(OWN)
    model = zo.load_pretrained(folder, config(nvme), trust_remote_code=True)
    assert type(model).__name__ == "Model"
    with zo.full_params(model):
        assert all(map(torch.equal, model.parameters(), original.parameters()))
    zo.close(model)


def test_generation_settings_come_along(tmp_path: Path, nvme: Path) -> None:
    original = small_llama()
    original.generation_config.max_new_tokens = 3
    model = zo.load_pretrained(saved(tmp_path / "model", original), config(nvme))
    assert model.generation_config.max_new_tokens == 3
    zo.close(model)
    assert leftovers(nvme) == []


def cut(folder: Path) -> None:
    file = folder / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lead_outside(folder: Path) -> None:
    file = folder / "part-1.safetensors"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to("../elsewhere")


def name_outside(folder: Path) -> None:
    (folder / "part-1.safetensors").rename(folder.parent / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("part-1", "../part-1"))


def promise_much(folder: Path) -> None:
    file = folder / "part-1.safetensors"
    file.write_bytes(b"\xff" * 7 + b"\x00" + file.read_bytes())


@pytest.mark.parametrize("spoil", [cut, lead_outside, name_outside, promise_much])
def test_a_hostile_folder_is_named_and_nothing_is_made(
    spoil: Callable[[Path], None], tmp_path: Path, nvme: Path
) -> None:
    model: Any = small_llama()
    folder = tmp_path / "model"
    model.config.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_folder(folder, tensors, num_files=2)
    zo.close(zo.load_pretrained(folder, config(nvme)))
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="part-1") as caught:
        zo.load_pretrained(folder, config(nvme))
    assert str(folder) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_mapping_names_differ_by_the_prefix_alone() -> None:
    """Of transformers before 5."""
    model = small_gpt2()
    whole, base = model.state_dict(), model.transformer.state_dict()
    for name in base:
        assert _with_prefix(model, name, whole) == f"transformer.{name}"
        assert _with_prefix(model.transformer, f"transformer.{name}", base) == name
    assert _with_prefix(model, "lm_head.weight", whole) == "lm_head.weight"
    assert _with_prefix(model, "other", whole) == "other"
