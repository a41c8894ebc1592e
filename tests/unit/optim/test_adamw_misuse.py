from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.runtime.slot_access import SlotAccess

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


def test_an_optimizer_made_before_offload_is_refused(make_net: MakeNet) -> None:
    with pytest.raises(zo.ConfigError, match=r"not offloaded: call zo.offload\(model\) first"):
        zo.AdamW(make_net().parameters())


def test_parameters_of_two_models_need_two_optimizers(offload: Offload, make_net: MakeNet) -> None:
    models = [offload(make_net()), offload(make_net())]
    with pytest.raises(zo.ConfigError, match="two offloaded models"):
        zo.AdamW([param for model in models for param in model.parameters()])


def test_a_parameter_unfrozen_after_offload_is_refused_by_name(offload: Offload, make_net: MakeNet) -> None:
    model = make_net()
    model.head.requires_grad_(False)
    offload(model)
    model.head.requires_grad_(True)
    with pytest.raises(zo.ConfigError, match=r"head\.weight was frozen"):
        zo.AdamW(model.parameters())


def test_frozen_parameters_may_be_handed_over_and_stay(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = make_net()
    model.head.requires_grad_(False)
    offload(model, "nvme")
    optimizer = zo.AdamW(model.parameters())
    with zo.full_params(model):
        before = model.head.weight.detach().clone()
    model(tokens).backward()
    optimizer.step()
    with zo.full_params(model):
        assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -1},
    ],
    ids=str,
)
def test_a_hyperparameter_out_of_range_is_named(offload: Offload, make_net: MakeNet, wrong: dict[str, Any]) -> None:
    model = offload(make_net())
    (name,) = wrong
    with pytest.raises(zo.ConfigError, match=f"AdamW: out of range: {name}="):
        zo.AdamW(model.parameters(), **wrong)


def test_a_refused_group_is_not_added(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net())
    optimizer = zo.AdamW(model.head.parameters())
    with pytest.raises(zo.ConfigError):
        optimizer.add_param_group({"params": list(model.layers.parameters()), "lr": -1.0})
    with pytest.raises(zo.ConfigError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


def test_a_gradient_replaced_by_the_user_is_refused_by_name_and_training_can_go_on(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(), "nvme")
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    model.head.weight.grad = torch.zeros(1, 16)
    with pytest.raises(zo.ConfigError, match=r"gradient of head\.weight was replaced"):
        optimizer.step()
    optimizer.zero_grad()
    model(tokens).backward()
    optimizer.step()


def no_exp_avg_sq(state: dict[str, Any]) -> None:
    del state["state"][4]["exp_avg_sq"]


def other_shape(state: dict[str, Any]) -> None:
    state["state"][4]["exp_avg"] = torch.zeros(3)


def no_tensor(state: dict[str, Any]) -> None:
    state["state"][4]["exp_avg"] = [0.0]


def no_step(state: dict[str, Any]) -> None:
    state["state"][4]["step"] = "often"


def no_betas(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["betas"]


def negative_rate(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = -1.0


def nothing(state: dict[str, Any]) -> None:
    state.clear()


def stepped(model: nn.Module, tokens: torch.Tensor) -> tuple[nn.Module, zo.AdamW]:
    """A model that was trained for one step, and its optimizer."""
    optimizer = zo.AdamW(model.parameters(), lr=0.25)
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_shape, r"layers\.1\.0\.bias: exp_avg has shape \(3,\), expected \(16,\)"),
        (no_exp_avg_sq, r"layers\.1\.0\.bias: the state lacks exp_avg_sq"),
        (no_tensor, r"layers\.1\.0\.bias: exp_avg is list, expected a tensor"),
        (no_step, r"layers\.1\.0\.bias: step is 'often', expected a number"),
        (no_betas, "of another optimizer: a group lacks betas"),
        (negative_rate, "out of range: lr=-1.0"),
        (nothing, "no optimizer's state: it has nothing"),
    ],
    ids=["shape", "moment", "type", "step", "group", "range", "empty"],
)
def test_a_wrong_state_is_refused_and_changes_nothing(
    offload: Offload,
    make_net: MakeNet,
    tokens: torch.Tensor,
    spoil: Callable[[dict[str, Any]], None],
    words: str,
) -> None:
    """Also not of the parameters before the one that is wrong, nor the hyperparameters."""
    model, optimizer = stepped(offload(make_net(), "nvme"), tokens)
    state = optimizer.state_dict()
    spoiled = copy.deepcopy(state)
    model(tokens).backward()
    optimizer.step()
    before = optimizer.state_dict()
    spoiled["param_groups"][0]["lr"] = 0.5
    spoil(spoiled)
    with pytest.raises(zo.ConfigError, match=words):
        optimizer.load_state_dict(spoiled)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for number, entry in before["state"].items():
        assert all(torch.equal(after["state"][number][name], value) for name, value in entry.items())
    # And the right one is still taken.
    optimizer.load_state_dict(state)
    assert float(optimizer.state_dict()["state"][4]["step"]) == 1.0


@pytest.mark.parametrize("num_written", [0, 2])
def test_a_state_that_could_not_all_be_written_ends_the_run(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = stepped(offload(make_net(), "nvme"), tokens)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    write, left = SlotAccess.write, iter(range(num_written))

    def fail_after_some(*arguments: Any) -> None:
        if next(left, None) is None:
            raise zo.TierIOError("write", "states.bin", errno.EIO)
        write(*arguments)

    monkeypatch.setattr(SlotAccess, "write", fail_after_some)
    with pytest.raises(zo.TierIOError, match=r"states\.bin"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25
    if num_written:
        with pytest.raises(zo.ConfigError, match="an edit ended half-way"):
            model(tokens)
    else:
        model(tokens).backward()
        optimizer.step()


@pytest.mark.parametrize("wrong", ["fewer parameters", "more groups"])
def test_a_state_dict_of_another_optimizer_is_refused(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, wrong: str
) -> None:
    model = offload(make_net())
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    optimizer.step()
    state = optimizer.state_dict()
    if wrong == "more groups":
        state["param_groups"] *= 2
    else:
        optimizer = zo.AdamW(model.head.parameters())
    with pytest.raises(zo.ConfigError):
        optimizer.load_state_dict(state)


def test_a_state_dict_of_another_mathematics_is_refused(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model, plain = offload(make_net()), make_net()
    theirs = torch.optim.AdamW(plain.parameters(), amsgrad=True)
    plain(tokens).backward()
    theirs.step()
    with pytest.raises(zo.ConfigError, match="amsgrad"):
        zo.AdamW(model.parameters()).load_state_dict(theirs.state_dict())


def test_a_state_dict_beyond_the_host_budget_is_refused_and_leaves_nothing(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(256), "nvme", host_memory="5600000B", device_memory="606208B")
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    optimizer.step()
    before = zo.step_report(model).tiers
    for _ in range(2):
        with pytest.raises(zo.BudgetError, match="copies for the user"):
            optimizer.state_dict()
    model(tokens).backward()
    optimizer.step()
    leased = [[tier.leased_bytes for tier in tiers] for tiers in (before, zo.step_report(model).tiers)]
    assert leased[0] == leased[1]


def test_a_closed_run_cannot_be_stepped(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme")
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    zo.close(model)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(zo.ConfigError, match=r"ended by zo.close"):
            call()
