from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from zerooffload import ConfigError
from zerooffload.integrations.huggingface import (
    LanguageModelProfiles,
    ModelSource,
    build_model,
    next_token_loss,
    profile_language_model,
    profiling,
)
from zerooffload.planner.activations import predict_activation_bytes
from zerooffload.telemetry import process_resident_bytes

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")


def test_it_is_what_training_on_such_a_batch_takes(tiny_llama: dict[str, Any]) -> None:
    source = ModelSource(config=tiny_llama, dtype=torch.bfloat16)
    profile = profile_language_model(source, batch_size=2, sequence_length=12)
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    forecast = predict_activation_bytes(
        lambda: build_model(source), lambda model: next_token_loss(model, tokens, tokens)
    )
    assert (profile.peak_nbytes, profile.saved_nbytes) == (forecast.peak_bytes, forecast.saved_bytes)
    assert (profile.name, profile.num_tokens) == ("llama", 24)
    assert [unit.name for unit in profile.units][1:3] == ["model.layers.0", "model.layers.1"]
    assert set(profile.units[1].forward.flops) == {"bf16"}


def test_folders_need_a_configuration_alone(tmp_path: Path, tiny_llama: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny_llama, "architectures": ["LlamaForCausalLM"]}))
    profile = profile_language_model(ModelSource(name=str(tmp_path)), batch_size=1, sequence_length=12)
    same = profile_language_model(ModelSource(config=tiny_llama), batch_size=1, sequence_length=12)
    assert (profile.name, profile.units) == (str(tmp_path), same.units)


def test_a_profile_tells_both_what_is_kept_and_what_is_computed_again(tiny_llama: dict[str, Any]) -> None:
    again, kept = (
        profile_language_model(
            ModelSource(config=tiny_llama, gradient_checkpointing=checkpointing), batch_size=1, sequence_length=12
        )
        for checkpointing in (True, False)
    )
    assert again == kept
    assert kept.units[1].input_nbytes < kept.units[1].saved_nbytes


def test_each_shape_is_traced_once(tiny_llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def trace_model(*args: Any, **kwargs: Any) -> object:
        traced.append((kwargs["batch_size"], kwargs["sequence_length"]))
        return original(*args, **kwargs)

    original = profiling.trace_model
    monkeypatch.setattr(profiling, "trace_model", trace_model)
    profiles = LanguageModelProfiles(ModelSource(config=tiny_llama))
    one, two, same = (profiles.of_batch(batch_size, 8) for batch_size in (1, 2, 1))
    assert traced == [(1, 8), (2, 8)]
    assert one is same
    assert [unit.forward.flops for unit in two.units] == [
        {dtype: 2 * flops for dtype, flops in unit.forward.flops.items()} for unit in one.units
    ]


@pytest.mark.parametrize("shape", [(0, 8), (1, 0), (-1, 8)])
def test_batches_without_tokens_are_refused(tiny_llama: dict[str, Any], shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="a batch needs a sample and a token"):
        profile_language_model(ModelSource(config=tiny_llama), batch_size=shape[0], sequence_length=shape[1])


def test_experts_that_are_called_one_by_one_are_refused_with_what_to_do() -> None:
    fields = {
        "model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "experts_implementation": "eager",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r'mixtral cannot be traced .* experts_implementation="grouped_mm"'):
        profile_language_model(ModelSource(config=fields), batch_size=1, sequence_length=8)


def test_blocks_of_a_large_model_take_no_memory() -> None:
    fields = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "dtype": "bfloat16",
    }  # fmt: skip
    before = process_resident_bytes()
    profile = profile_language_model(ModelSource(config=fields), batch_size=1, sequence_length=4096)
    head, block = 128256 * 8192, 8192 * 8192 * 2 + 8192 * 1024 * 2 + 3 * 8192 * 28672
    # Weights and activations would be 19 GB.
    assert process_resident_bytes() - before < 1e9 < 2 * (2 * head + 4 * block)
    attention = 2 * 2 * 64 * 128 * (4096 * 4097 // 2)
    assert sum(unit.forward.flops.get("bf16", 0) for unit in profile.units) == (
        2 * 4096 * (head + 4 * block) + 4 * attention
    )
