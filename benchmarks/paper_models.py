"""Language models without weights, of any depth: two blocks are traced, and the rest are like them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from zerooffload.config import OffloadConfig
from zerooffload.entry.planning import plan_model
from zerooffload.integrations.huggingface import LanguageModelProfiles, ModelSource, build_model, model_config
from zerooffload.planner.plan import Plan
from zerooffload.planner.profiles import MachineProfile, ModelProfile
from zerooffload.sharding.grouping import find_units

_NUM_TRACED = 2


class PaperModel(Protocol):
    """A model of any depth."""

    layers: int
    sequence_length: int

    def fields(self, layers: int) -> dict[str, Any]:
        """Of its config.json, at that depth."""


@dataclass(frozen=True, kw_only=True)
class Gpt:
    """A GPT of the papers: blocks of 12 hidden^2 parameters, in fp16."""

    hidden: int
    layers: int
    sequence_length: int = 1024

    def fields(self, layers: int) -> dict[str, Any]:
        """See `PaperModel`."""
        sizes = {"n_embd": self.hidden, "n_layer": layers, "n_head": self.hidden // 128, "n_positions": 1024}
        return {"model_type": "gpt2", "vocab_size": 50304, "dtype": "float16", **sizes}


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama in bf16."""

    hidden: int
    intermediate: int
    layers: int
    kv_heads: int
    vocabulary: int
    sequence_length: int = 2048

    def fields(self, layers: int) -> dict[str, Any]:
        """See `PaperModel`."""
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": layers}
        heads = {"num_attention_heads": self.hidden // 128, "num_key_value_heads": self.kv_heads}
        others = {"vocab_size": self.vocabulary, "tie_word_embeddings": False, "dtype": "bfloat16"}
        return {"model_type": "llama", **sizes, **heads, **others}


def plan_paper_model(
    paper: PaperModel, config: OffloadConfig, machine: MachineProfile, *, batch_size: int, checkpoints: bool = False
) -> Plan:
    """A plan of it; with `checkpoints` its blocks are computed again in backward.

    Raises
    ------
    BudgetError
        If it does not fit.
    """
    model = _model(paper)
    units = find_units(model, config.units)
    blocks = [unit.name for unit in units if unit.is_block]
    return plan_model(
        model,
        units,
        lambda num_samples: _deeper(_traced(paper, num_samples), blocks),
        config,
        machine,
        batch_size=batch_size,
        computed_again=frozenset(blocks if checkpoints else ()),
    )


@functools.lru_cache(maxsize=4)
def _model(paper: PaperModel) -> nn.Module:
    source = ModelSource(config=paper.fields(paper.layers))
    with torch.device("meta"):
        return build_model(source, model_config(source))


def _traced(paper: PaperModel, num_samples: int) -> ModelProfile:
    return _traced_fields(json.dumps(paper.fields(_NUM_TRACED)), num_samples, paper.sequence_length)


@functools.lru_cache(maxsize=8)
def _traced_fields(fields: str, num_samples: int, sequence_length: int) -> ModelProfile:
    source = ModelSource(config=json.loads(fields))
    return LanguageModelProfiles(source).of_batch(num_samples, sequence_length)


def _deeper(profile: ModelProfile, blocks: list[str]) -> ModelProfile:
    """A profile with these blocks, each like the last one that was traced."""
    traced = [work for work in profile.units if work.name in blocks]
    position = profile.units.index(traced[0])
    repeated = [replace(traced[-1], name=name) for name in blocks]
    return replace(profile, units=(*profile.units[:position], *repeated, *profile.units[position + len(traced) :]))
