"""A model on the meta device gets the values that building it in memory with the same seed would have given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import zerooffload as zo

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


class Mixed(nn.Module):
    """Modules that draw, modules that do not, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.convolution = nn.Conv1d(8, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)


def llama(*, tied: bool) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))
    return model


@pytest.mark.parametrize(
    "build", [Mixed, lambda: llama(tied=True), lambda: llama(tied=False)], ids=["modules", "tied llama", "llama"]
)
def test_the_values_are_those_of_a_model_built_in_memory(build: Callable[[], nn.Module], nvme: Path) -> None:
    torch.manual_seed(7)
    expected = build()
    with torch.device("meta"):
        model = build()
    params = list(model.parameters())
    torch.manual_seed(7)
    homes = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
    zo.offload(model, zo.OffloadConfig(**homes, nvme_paths=nvme, host_memory="32MiB", threads=1))
    assert all(mine is before for mine, before in zip(model.parameters(), params, strict=True))
    with zo.full_params(model, writeback=False):
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    zo.close(model)
