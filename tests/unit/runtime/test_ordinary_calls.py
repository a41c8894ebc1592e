"""Calls that know nothing of offloading: right, or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hidden_turns import Hidden, hidden_updates
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zerooffload as zo

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


@pytest.fixture(params=["host", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("tied", [False, True])
def test_a_state_dict_has_the_values_and_tied_stays_tied(
    offload: Offload,
    make_net: MakeNet,
    tier: str,
    tied: bool,  # noqa: FBT001
) -> None:
    model, plain = offload(make_net(tied=tied), tier), make_net(tied=tied)
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    same_memory = state["embed.weight"].data_ptr() == state["unembed.weight"].data_ptr()
    assert same_memory == tied


def test_a_state_dict_of_a_part_has_its_names(offload: Offload, make_net: MakeNet, tier: str) -> None:
    model = offload(make_net(), tier)
    state = model.layers[1].state_dict(prefix="block.")
    assert list(state) == ["block.0.weight", "block.0.bias"]
    assert torch.equal(state["block.0.weight"], make_net().layers[1][0].weight)


def test_a_state_dict_is_a_copy_that_training_does_not_change(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(), "nvme")
    state = model.state_dict()
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    model(tokens).backward()
    optimizer.step()
    assert torch.equal(state["head.weight"], make_net().head.weight)
    assert not torch.equal(model.state_dict()["head.weight"], state["head.weight"])


def test_a_state_dict_beyond_the_host_budget_is_refused_and_comes_back_when_dropped(
    offload: Offload, make_net: MakeNet
) -> None:
    # Room for the copies of one state dict of 818 KiB, not of two.
    model = offload(make_net(256), "nvme", host_memory="7000000B", device_memory="606208B")
    first = model.state_dict()
    with pytest.raises(zo.BudgetError, match="copies for the user"):
        model.state_dict()
    assert torch.equal(first["head.weight"], make_net(256).head.weight)
    first.clear()
    assert torch.equal(model.state_dict()["embed.weight"], make_net(256).embed.weight)


def test_torch_save_of_a_state_dict_works(offload: Offload, make_net: MakeNet, tmp_path: Path) -> None:
    model = offload(make_net(tied=True), "nvme")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh = make_net(tied=True, seed=5)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(fresh.unembed.weight, make_net().embed.weight)


def test_loading_a_state_dict_reaches_the_homes(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model, other = offload(make_net(), tier), make_net(seed=7)
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(model(tokens), other(tokens))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("head.bias"), "Missing key.*head.bias"),
        (lambda state: state.update(extra=torch.zeros(1)), "Unexpected key.*extra"),
        (lambda state: state.update({"head.weight": torch.zeros(2, 2)}), "size mismatch for head.weight"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_strict_loading_complains_as_torch_does_and_the_run_goes_on(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    model = offload(make_net(), "nvme")
    state = make_net().state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        model.load_state_dict(state)
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    optimizer.step()


def test_loading_that_would_replace_parameters_is_refused(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net(), "nvme")
    with pytest.raises(zo.ConfigError, match=r"assign=True"):
        model.load_state_dict(make_net().state_dict(), assign=True)


class Scaled(nn.Module):
    """A parameter of the root beside a large block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.sum() * self.scale.sum()


def test_loading_that_does_not_fit_leaves_the_run_usable(offload: Offload) -> None:
    model = Scaled()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(zo.BudgetError) as caught:
        offload(model, "nvme", host_memory=0, device_memory="540672B")
    least = int(str(caught.value).split('host_memory = "')[1].split("B")[0])
    offload(model, "nvme", host_memory=least + 8192, device_memory="540672B")
    with pytest.raises(zo.BudgetError, match="copies for the user"):
        model.load_state_dict(state)
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(1, 256)).backward()
    optimizer.step()


REFUSED: dict[str, Callable[[nn.Module, Path], Any]] = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "deepcopy of a part": lambda model, _: copy.deepcopy(model.layers),
    "deepcopy in a wrapper": lambda model, _: copy.deepcopy(nn.Sequential(model)),
    "pickle": lambda model, _: pickle.dumps(model),
    "torch.save": lambda model, path: torch.save(model, path / "model.pt"),
    "half": lambda model, _: model.half(),
    "double": lambda model, _: model.double(),
    "bfloat16 of a part": lambda model, _: model.layers[0].bfloat16(),
    "half in a wrapper": lambda model, _: nn.Sequential(model).half(),
    "to dtype": lambda model, _: model.to(torch.float16),
    "to meta": lambda model, _: model.to("meta"),
    "type": lambda model, _: model.type(torch.float64),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_a_call_that_would_give_garbage_is_refused_and_changes_nothing(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tmp_path: Path, call: Callable[..., Any]
) -> None:
    model = offload(make_net(), "nvme")
    with pytest.raises(zo.ConfigError):
        call(model, tmp_path)
    assert torch.equal(model(tokens), make_net()(tokens))


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "deepcopy": copy.deepcopy,
    "clone": lambda param: param.clone(),
    "detach": lambda param: param.detach(),
    "data": lambda param: param.data,
    "transposed": lambda param: param.T,
    "item": lambda param: param[0, 0].item(),
    "numpy": lambda param: param.numpy(force=True),
    "penalty": lambda param: param.square().sum(),
    "fill": nn.init.zeros_,
    "one of several": lambda param: torch.cat([torch.zeros(1), param.view(-1)]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_values_that_are_away_are_not_read_in_silence(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, read: Callable[[nn.Parameter], Any]
) -> None:
    model = offload(make_net(), "nvme")
    for _ in range(2):
        with pytest.raises(zo.ConfigError, match=r"head\.weight was used outside of the model's forward"):
            read(model.head.weight)
        # Its values stay where they are as long as there is room, but nobody may count on it.
        model(tokens)
    zo.close(model)
    with pytest.raises(zo.ConfigError, match="ended"):
        read(model.head.weight)


def test_what_needs_no_values_is_as_ever(offload: Offload, make_net: MakeNet) -> None:
    model, plain = offload(make_net(), "nvme"), make_net()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        assert (ours.shape, ours.dtype, ours.device, ours.numel()) == (
            theirs.shape,
            theirs.dtype,
            theirs.device,
            theirs.numel(),
        )
        assert (ours.is_leaf, ours.grad, ours.requires_grad) == (True, None, True)
        assert "nan" in repr(ours)


ALLOWED: dict[str, Callable[[nn.Module], Any]] = {
    "to the same device": lambda model: model.to("cpu"),
    "to the same dtype": lambda model: model.to(torch.float32),
    "to both": lambda model: model.to("cpu", torch.float32),
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "train and eval": lambda model: model.eval().train(),
    "zero_grad": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED.keys())
def test_a_call_that_changes_nothing_is_let_through(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, call: Callable[[nn.Module], Any]
) -> None:
    model = offload(make_net(), "nvme")
    call(model)
    assert torch.equal(model(tokens), make_net()(tokens))


def test_after_the_end_a_model_that_never_moved_is_an_ordinary_one_again(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(), "host")
    zo.close(model)
    copied = copy.deepcopy(model).double()
    assert copied.head.weight.dtype is torch.float64
    assert torch.equal(model(tokens), make_net()(tokens))
    assert torch.equal(pickle.loads(pickle.dumps(model)).head.weight, make_net().head.weight)  # noqa: S301 - our bytes


@pytest.mark.parametrize("call", [lambda model: model.state_dict(), copy.deepcopy], ids=["state_dict", "deepcopy"])
def test_after_the_end_values_that_are_gone_are_not_given_out(
    offload: Offload, make_net: MakeNet, call: Callable[[nn.Module], Any]
) -> None:
    model = offload(make_net(), "nvme")
    zo.close(model)
    with pytest.raises(zo.ConfigError):
        call(model)


def test_after_the_end_a_forward_is_refused(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme")
    zo.close(model)
    with pytest.raises(zo.ConfigError, match=r"zo\.close"):
        model(tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_of_an_offloaded_model_loads_back_equal(
    offload: Offload,
    tmp_path: Path,
    tier: str,
    tied: bool,  # noqa: FBT001
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offload(model, tier)
    model.save_pretrained(tmp_path / "saved")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_a_state_dict_waits_for_the_updates_of_its_part(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    states = []
    for update in ("after_backward", "under_next_forward"):
        with hidden_updates(Hidden.LATE):
            model = offload(make_net(), tier, update=update)
            optimizer = zo.AdamW(model.parameters(), lr=0.1)
            model(tokens).backward()
            optimizer.step()
            part = model.layers[1].state_dict(prefix="layers.1.")
            state = model.state_dict()
            assert all(torch.equal(state[name], value) for name, value in part.items())
            states.append({name: value.clone() for name, value in state.items()})
            zo.close(model)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
