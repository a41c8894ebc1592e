"""On a GPU, wherever the states live, losses, norms and parameters have the bits of plain training on that GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import COMBINATIONS, Homes, least_memory
from support.reference_training import Outcome, Recipe, differences, train_offloaded
from support.small_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FP32 = {name: Recipe(build=build) for name, build in MODELS.items()}
BF16 = {name: Recipe(build=build, compute_dtype="bf16", num_steps=8) for name, build in MODELS.items()}

ADDED_IN_FP32 = {
    dtype: Recipe(compute_dtype=dtype, num_steps=4, num_micro_steps=4, accumulation_steps=4)
    for dtype in ("bf16", "fp16")
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_fp32(homes: Homes, model: str, nvme: Path, plain_on_cuda: Callable[[Recipe], Outcome]) -> None:
    assert train(FP32[model], homes, nvme, plain_on_cuda) == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_bf16(homes: Homes, model: str, nvme: Path, plain_on_cuda: Callable[[Recipe], Outcome]) -> None:
    assert train(BF16[model], homes, nvme, plain_on_cuda) == []


@pytest.mark.parametrize("dtype", ADDED_IN_FP32)
@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_gradients_of_several_backwards(
    homes: Homes, dtype: str, nvme: Path, plain_on_cuda: Callable[[Recipe], Outcome]
) -> None:
    assert train(ADDED_IN_FP32[dtype], homes, nvme, plain_on_cuda) == []


@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_the_least_window_and_small_chunks(
    homes: Homes, nvme: Path, plain_on_cuda: Callable[[Recipe], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every unit is evicted and refilled many times; a stray read of what is away would be NaN."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB"}
    config["device_memory"] = least_memory(FP32["llama"], None, "device_memory", **config)
    outcome = train_offloaded(FP32["llama"], **config)
    assert not any(math.isnan(loss) for loss in outcome.losses)
    assert differences(plain_on_cuda(FP32["llama"]), outcome) == []


def test_device_memory_stays_in_the_budget(nvme: Path) -> None:
    """A model whose states are several times the budget; activations of these few tokens are small beside it."""
    recipe = Recipe(build=wide_llama, num_steps=3)
    config = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "nvme_paths": [nvme]}
    least = least_memory(recipe, None, "device_memory", **config)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome = train_offloaded(recipe, device_memory=least, **config)
    peak = torch.cuda.max_memory_allocated() - before
    assert outcome.report is not None
    model_nbytes = sum(param.nbytes for param in wide_llama().parameters())
    assert outcome.report.tiers[0].peak_bytes == least < model_nbytes
    assert peak < least + model_nbytes / 4


def wide_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - only here

    torch.manual_seed(12)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=128,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(recipe: Recipe, homes: Homes, nvme: Path, plain_on_cuda: Callable[[Recipe], Outcome]) -> list[str]:
    params, optimizer, gradients = homes
    outcome = train_offloaded(recipe, params=params, optimizer=optimizer, gradients=gradients, nvme_paths=[nvme])
    return differences(plain_on_cuda(recipe), outcome)
