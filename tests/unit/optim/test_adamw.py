"""The optimizer's face: everything that torch's own offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerooffload as zo

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, num_steps: int = 1) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def values(model: nn.Module) -> list[torch.Tensor]:
    with zo.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(params=["host", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


def test_it_is_torchs_optimizer_and_follows_torchs_adamw(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model, plain = offload(make_net(), tier), make_net()
    ours, theirs = zo.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    assert isinstance(ours, torch.optim.Optimizer)
    assert steps(model, ours, tokens, 5) == pytest.approx(steps(plain, theirs, tokens, 5), rel=1e-5)
    for got, expected in zip(values(model), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_groups_have_hyperparameters_of_their_own(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model, plain = offload(make_net(), "nvme"), make_net()

    def grouped(net: nn.Module) -> list[dict[str, Any]]:
        decayed = [param for param in net.parameters() if param.ndim > 1]
        rest = [param for param in net.parameters() if param.ndim < 2]
        return [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "lr": 0.0, "maximize": True}]

    ours = zo.AdamW(grouped(model), lr=1e-2, betas=(0.5, 0.9), eps=1e-6)
    theirs = torch.optim.AdamW(grouped(plain), lr=1e-2, betas=(0.5, 0.9), eps=1e-6)
    before = values(model)
    steps(model, ours, tokens, 3)
    steps(plain, theirs, tokens, 3)
    for old, got, expected in zip(before, values(model), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(old, got) == (got.ndim < 2)


def test_parameters_in_no_group_stay(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme")
    optimizer = zo.AdamW(model.head.parameters())
    before = values(model)
    steps(model, optimizer, tokens)
    changed = [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
    assert [name for (name, _), moved in zip(model.named_parameters(), changed, strict=True) if moved] == [
        "head.weight",
        "head.bias",
    ]


def test_a_group_added_later_is_trained_from_then_on(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme")
    optimizer = zo.AdamW(model.head.parameters(), lr=1e-2)
    steps(model, optimizer, tokens)
    optimizer.add_param_group({"params": list(model.layers.parameters()), "lr": 1e-3})
    steps(model, optimizer, tokens)
    step_of = [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
    assert step_of == [2.0] * 2 + [1.0] * 6


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_state_and_values_taken_over_continue_bit_for_bit(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str, compute_dtype: str
) -> None:
    model = offload(make_net(), tier, compute_dtype=compute_dtype)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, tokens, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    expected = steps(model, optimizer, tokens, 3), values(model)
    zo.close(model)

    again = offload(make_net(seed=1), tier, compute_dtype=compute_dtype)
    again.load_state_dict(weights)
    resumed = zo.AdamW(again.parameters(), lr=0.5)
    resumed.load_state_dict(state)
    assert steps(again, resumed, tokens, 3) == expected[0]
    assert same(values(again), expected[1])


def test_state_goes_to_torchs_adamw_and_back(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model, plain = offload(make_net(), tier), make_net()
    ours, theirs = zo.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    steps(model, ours, tokens, 2)
    theirs.load_state_dict(ours.state_dict())
    for param, entry in zip(plain.parameters(), ours.state_dict()["state"].values(), strict=True):
        assert torch.equal(theirs.state[param]["exp_avg"], entry["exp_avg"])
        assert entry["exp_avg_sq"].shape == param.shape
        assert float(entry["step"]) == 2.0
    steps(plain, theirs, tokens)
    ours.load_state_dict(theirs.state_dict())
    for number, param in enumerate(plain.parameters()):
        entry = ours.state_dict()["state"][number]
        assert torch.equal(theirs.state[param]["exp_avg_sq"], entry["exp_avg_sq"])
        assert float(entry["step"]) == 3.0


def test_frozen_parameters_do_not_stand_in_the_way_of_loading(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = make_net()
    model.layers[0].requires_grad_(False)
    offload(model, "nvme")
    optimizer = zo.AdamW(model.parameters())
    steps(model, optimizer, tokens)
    before = optimizer.state_dict()["state"]
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state_dict()["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[number]["exp_avg"], after[number]["exp_avg"]) for number in before)


def test_a_state_dict_before_the_first_step_is_empty(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net())
    state = zo.AdamW(model.parameters(), lr=0.25).state_dict()
    assert state["state"] == {}
    assert state["param_groups"][0]["lr"] == 0.25


def test_loading_a_state_without_steps_starts_afresh(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net())
    optimizer = zo.AdamW(model.parameters())
    fresh = optimizer.state_dict()
    steps(model, optimizer, tokens)
    optimizer.load_state_dict(fresh)
    assert optimizer.state_dict()["state"] == {}


def test_a_new_optimizer_starts_afresh(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net())
    steps(model, zo.AdamW(model.parameters()), tokens)
    assert zo.AdamW(model.parameters()).state_dict()["state"] == {}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scheduler_sets_the_learning_rate(
    offload: Offload,
    make_net: MakeNet,
    tokens: torch.Tensor,
    as_tensor: bool,  # noqa: FBT001
) -> None:
    model, plain = offload(make_net(), "nvme"), make_net()
    lr = torch.tensor(0.1) if as_tensor else 0.1
    ours, theirs = zo.AdamW(model.parameters(), lr=lr), torch.optim.AdamW(plain.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in (ours, theirs)]
    for _ in range(3):
        for net, optimizer, schedule in ((model, ours, schedules[0]), (plain, theirs, schedules[1])):
            steps(net, optimizer, tokens)
            schedule.step()
    assert float(ours.param_groups[0]["lr"]) == pytest.approx(0.0125)
    for got, expected in zip(values(model), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_a_tensor_learning_rate_is_read_when_step_is_called(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net())
    optimizer = zo.AdamW(model.parameters(), lr=torch.tensor(0.5), weight_decay=0.0)
    before = values(model)
    model(tokens).backward()
    optimizer.param_groups[0]["lr"].fill_(0.0)
    optimizer.step()
    assert same(before, values(model))


def test_a_closure_is_called_with_gradients_on(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net())
    optimizer = zo.AdamW(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == float(make_net()(tokens).detach())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_gradients(
    offload: Offload,
    make_net: MakeNet,
    tokens: torch.Tensor,
    tier: str,
    set_to_none: bool,  # noqa: FBT001
) -> None:
    model = offload(make_net(), tier)
    optimizer = zo.AdamW(model.parameters())
    before = values(model)
    model(tokens).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert same(before, values(model))
    assert optimizer.state_dict()["state"] == {}


def test_gradients_accumulate_over_backwards(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model, plain = offload(make_net(), tier), make_net()
    for net in (model, plain):
        net(tokens).backward()
        net(tokens + 3).backward()
    with zo.full_params(model, grads=True):
        assert same([param.grad for param in model.parameters()], [param.grad for param in plain.parameters()])
