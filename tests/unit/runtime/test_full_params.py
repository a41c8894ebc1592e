"""The whole parameters of a module, to read and to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.optim.reference import join_master
from zerooffload.sharding.registry import residence_of

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


@pytest.fixture(params=["host", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The fp32 masters of a bf16 model."""
    states = {}
    with zo.full_params(model):
        for name, param in model.named_parameters():
            run = residence_of(param).run  # type: ignore[union-attr]
            states[name] = join_master(param.detach().clone(), run.read_optimizer_state(param)["remainder"])
    return states


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    with zo.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_inside_parameters_have_their_values_and_away_after(offload: Offload, make_net: MakeNet, tier: str) -> None:
    model = offload(make_net(), tier)
    with zo.full_params(model):
        for param, expected in zip(model.parameters(), make_net().parameters(), strict=True):
            assert torch.equal(param, expected)
    assert equal(copies(model), dict(make_net().named_parameters()))


def test_a_part_of_a_model_can_be_asked_alone(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net(), "nvme")
    with zo.full_params(model.layers[1]):
        assert torch.equal(model.layers[1][0].weight, make_net().layers[1][0].weight)
        with pytest.raises(zo.ConfigError, match=r"layers\.0\.0\.weight was used outside"):
            model.layers[0][0].weight.isnan()


def test_edits_reach_training(offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str) -> None:
    model, plain = offload(make_net(), tier), make_net()
    for net in (model, plain):
        context: Any = zo.full_params(net) if net is model else _nothing()
        with context, torch.no_grad():
            net.layers[0][0].weight.mul_(2)
            net.head.bias.fill_(3.0)
    assert torch.equal(model(tokens), plain(tokens))
    assert equal(copies(model), dict(plain.named_parameters()))


@pytest.mark.parametrize("how", ["writeback off", "raising"])
def test_edits_are_undone(offload: Offload, make_net: MakeNet, tier: str, how: str) -> None:
    model = offload(make_net(), tier)
    if how == "writeback off":
        with zo.full_params(model, writeback=False), torch.no_grad():
            model.head.weight.zero_()
            assert not model.head.weight.any()
    else:
        with pytest.raises(ZeroDivisionError), zo.full_params(model), torch.no_grad():  # noqa: PT012 - an edit first
            model.head.weight.zero_()
            _ = 1 / 0
    assert equal(copies(model), dict(make_net().named_parameters()))


def test_a_block_that_raises_leaves_the_run_usable(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model = offload(make_net(), tier)
    optimizer = zo.AdamW(model.parameters())
    with pytest.raises(KeyboardInterrupt), zo.full_params(model, grads=True):
        raise KeyboardInterrupt
    model(tokens).backward()
    optimizer.step()


def test_in_bf16_a_remainder_is_dropped_only_where_the_value_changed(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model = offload(make_net(), tier, compute_dtype="bf16")
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    model(tokens).backward()
    optimizer.step()
    before = masters(model)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
    with zo.full_params(model), torch.no_grad():
        model.head.weight[0, 3] = 0.5
        model.layers[0][0].weight.copy_(model.layers[0][0].weight.clone())
    after = masters(model)
    expected = before["head.weight"].clone()
    expected[0, 3] = 0.5
    assert torch.equal(after.pop("head.weight"), expected)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_bf16_masters_are_the_fp32_values_that_were_offloaded(offload: Offload, make_net: MakeNet, tier: str) -> None:
    model = offload(make_net(), tier, compute_dtype="bf16")
    assert model.head.weight.dtype is torch.bfloat16
    assert equal(masters(model), dict(make_net().named_parameters()))


def test_gradients_are_shown_if_asked_for(offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str) -> None:
    model, plain = offload(make_net(), tier), make_net()
    for net in (model, plain):
        net(tokens).backward()
    with zo.full_params(model, grads=True):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad, expected.grad)
    with pytest.raises(zo.ConfigError, match=r"zo\.full_params"):
        model.head.weight.grad.sum()


def test_edited_new_and_removed_gradients_are_what_the_step_uses(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model, plain = offload(make_net(), tier), make_net()
    ours = zo.AdamW(model.parameters(), lr=0.1, eps=1.0)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1.0)
    for net in (model, plain):
        net(tokens).backward()
        net.layers[2].zero_grad()
        with zo.full_params(model, grads=True) if net is model else _nothing():
            net.head.weight.grad.mul_(3)
            net.head.bias.grad = None
            net.layers[2][0].weight.grad = torch.ones(16, 16)
    ours.step()
    theirs.step()
    got = copies(model)
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(got["head.bias"], make_net().head.bias)
    assert torch.equal(got["layers.2.0.bias"], make_net().layers[2][0].bias)


def test_gradient_edits_without_writeback_are_undone(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model, plain = offload(make_net(), tier), make_net()
    for net in (model, plain):
        net(tokens).backward()
    with zo.full_params(model, writeback=False, grads=True):
        model.head.weight.grad.zero_()
        model.head.bias.grad = None
    with zo.full_params(model, grads=True):
        assert torch.equal(model.head.weight.grad, plain.head.weight.grad)
        assert torch.equal(model.head.bias.grad, plain.head.bias.grad)


@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
def test_looking_at_clipped_gradients_changes_no_bit(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, gradients: str
) -> None:
    """In bf16 a gradient times clipping's factor is rounded to be shown; the update gets it as it was."""
    results = []
    for looks in (False, True):
        model = offload(make_net(), gradients=gradients, compute_dtype="bf16")
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        model(tokens).backward()
        zo.clip_grad_norm_(model, 0.013)
        if looks:
            with zo.full_params(model, grads=True):
                assert model.head.weight.grad.any()
        optimizer.step()
        results.append(masters(model))
        zo.close(model)
    assert equal(*results)


def test_a_gradient_that_was_set_to_none_before_is_none_inside_and_after(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model = offload(make_net(), tier)
    model(tokens).backward()
    model.head.weight.grad = None
    with zo.full_params(model, writeback=False, grads=True):
        assert model.head.weight.grad is None
    assert model.head.weight.grad is None


def test_copies_are_leased_and_given_back(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme")
    optimizer = zo.AdamW(model.parameters())
    leased = []
    for _ in range(2):
        model(tokens).backward()
        optimizer.step()
        leased.append([tier.leased_bytes for tier in zo.step_report(model).tiers])
        with zo.full_params(model, grads=True):
            pass
    assert leased[0] == leased[1]


def test_a_window_too_small_is_refused_and_leaves_the_run_usable(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(256), "nvme", device_memory="606208B")
    optimizer = zo.AdamW(model.parameters())
    with pytest.raises(zo.BudgetError, match="parameters in use"), zo.full_params(model):
        pass
    with zo.full_params(model.head):
        assert torch.equal(model.head.weight, make_net(256).head.weight)
    model(tokens).backward()
    optimizer.step()


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ReLU()], ids=["not offloaded", "no parameters"])
def test_a_module_that_is_not_offloaded_is_refused(model: nn.Module) -> None:
    with pytest.raises(zo.ConfigError, match=type(model).__name__), zo.full_params(model):
        pass


def test_stepping_inside_is_refused_and_training_can_go_on(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(), "nvme")
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    with zo.full_params(model), pytest.raises(zo.ConfigError, match="in use"):
        optimizer.step()
    optimizer.step()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
