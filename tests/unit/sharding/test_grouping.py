"""How models are cut, on the shapes of models that people train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from zerooffload import ConfigError
from zerooffload.sharding.grouping import ROOT_NAME, UnitModules, find_units

TINY = {"vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32}


def llama(*, tied: bool) -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**TINY, **heads, tie_word_embeddings=tied))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, num_layers=2, num_decoder_layers=3, **sizes))


def mixtral() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(**TINY, **heads, num_local_experts=4, num_experts_per_tok=2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(tied=False),
    "llama, tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "t5": t5,
    "mixtral": mixtral,
    "sequential": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)),
    "mlp": Mlp,
    "one layer": lambda: nn.Linear(3, 3),
    "shared block": lambda: nn.ModuleList([nn.Linear(4, 4)] * 3),
}


def names(units: list[UnitModules]) -> list[str]:
    return [unit.name for unit in units]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("spec", ["auto", lambda _, module: isinstance(module, nn.Linear)], ids=["auto", "linears"])
def test_every_parameter_belongs_to_one_unit_and_its_users_know(make: Callable[[], nn.Module], spec: Any) -> None:
    model = make()
    if spec != "auto" and isinstance(model, nn.Linear):
        pytest.skip("the root is always a unit of its own")
    units = find_units(model, spec)
    owner_of = {name: unit.name for unit in units for group in unit.param_names for name in group}
    params = dict(model.named_parameters(remove_duplicate=False))
    assert owner_of.keys() == params.keys()
    assert names(units)[-1] == ROOT_NAME
    groups = [group for unit in units for group in unit.param_names]
    assert all(len({id(params[name]) for name in group}) == 1 for group in groups)
    assert len(groups) == len({id(param) for param in params.values()})
    modules = dict(model.named_modules())
    for unit in units:
        assert unit.module is (model if unit.name == ROOT_NAME else modules[unit.name])
        assert set(unit.needs) <= set(names(units))
        if unit.param_names:
            assert unit.name in unit.needs


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "llama",
            ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "lm_head", ROOT_NAME],
        ),
        (
            "gpt2",
            ["transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(3)), "lm_head", ROOT_NAME],
        ),
        (
            "t5",
            ["shared", *(f"encoder.block.{i}" for i in range(2)), *(f"decoder.block.{i}" for i in range(3)), "lm_head"],
        ),
        ("mixtral", ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "lm_head", ROOT_NAME]),
        ("sequential", ["0", "2", "3", ROOT_NAME]),
        ("mlp", [ROOT_NAME]),
        ("one layer", [ROOT_NAME]),
    ],
)
def test_blocks_embedding_and_head_are_found_by_themselves(model: str, expected: list[str]) -> None:
    found = names(find_units(MODELS[model](), "auto"))
    # T5 names its shared embedding three times.
    unique = [name for name in found if not name.endswith("coder.embed_tokens")]
    assert unique[: len(expected)] == expected


def test_a_tied_head_owns_nothing_and_needs_the_embedding() -> None:
    units = {unit.name: unit for unit in find_units(llama(tied=True), "auto")}
    assert units["lm_head"].param_names == ()
    assert units["lm_head"].needs == ("model.embed_tokens",)
    assert units["model.embed_tokens"].param_names == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_the_root_keeps_what_is_left() -> None:
    root = find_units(llama(tied=False), "auto")[-1]
    assert root.param_names == (("model.norm.weight",),)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ([nn.Linear], ["0", "2", "3", ROOT_NAME]),
        (["0", "[23]"], ["0", "2", "3", ROOT_NAME]),
        (["2"], ["2", ROOT_NAME]),
        (lambda name, module: name == "3" and isinstance(module, nn.Linear), ["3", ROOT_NAME]),
    ],
    ids=["classes", "patterns", "one name", "callable"],
)
def test_units_can_be_given(spec: Any, expected: list[str]) -> None:
    assert names(find_units(MODELS["sequential"](), spec)) == expected


def test_a_unit_inside_a_unit_owns_its_own_parameters_alone() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    units = {unit.name: unit for unit in find_units(model, ["0", "0.1"])}
    assert units["0"].param_names == (("0.0.weight",), ("0.0.bias",))
    assert units["0.1"].param_names == (("0.1.weight",), ("0.1.bias",))
    assert units[ROOT_NAME].param_names == (("1.weight",), ("1.bias",))


def test_a_small_list_beside_the_model_is_no_list_of_its_blocks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
            self.blocks = nn.ModuleList(nn.Linear(50, 50) for _ in range(2))

    assert names(find_units(Model(), "auto")) == ["blocks.0", "blocks.1", ROOT_NAME]


@pytest.mark.parametrize("spec", [["nothing.*"], [nn.Conv2d], lambda *_: False], ids=["pattern", "class", "callable"])
def test_units_that_match_nothing_are_refused_with_names_that_exist(spec: Any) -> None:
    with pytest.raises(ConfigError, match="first, second"):
        find_units(Mlp(), spec)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential()])
def test_a_model_without_parameters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=f"{type(model).__name__}.* no parameters"):
        find_units(model, "auto")


def test_the_same_parameter_twice_in_one_module_is_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(2))
            self.b = self.a

    (unit,) = find_units(Twice(), "auto")
    assert unit.param_names == (("a", "b"),)


def test_lists_in_a_list_are_no_blocks_but_what_is_in_them_is() -> None:
    """Nobody calls a list: its hooks would never run."""
    shared = nn.Linear(4, 4)
    stages = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), shared]) for _ in range(2))
    named = nn.ModuleDict({"side": nn.Linear(4, 4), "deep": nn.ModuleDict({"er": nn.Linear(4, 4)})})
    units = find_units(nn.Sequential(nn.ModuleList([*stages, named])), "auto")
    names = [unit.name for unit in units]
    assert names == ["0.0.0", "0.0.1", "0.1.0", "0.2.side", "0.2.deep.er", ROOT_NAME]
