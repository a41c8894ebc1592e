"""Parameters that are used where no module of theirs is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zerooffload as zo

Offload = Callable[..., nn.Module]
WIDTH = 16
BLOCK_NBYTES = 4096
"""Of the range of a block, whose weight and bias take less."""


@pytest.fixture(params=["host", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


class Squared(torch.autograd.Function):
    """Reads a parameter in backward that autograd does not know of."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, holder: list[nn.Linear]) -> torch.Tensor:
        ctx.holder = holder
        return hidden @ holder[0].weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] @ ctx.holder[0].weight.detach().T, None


class Borrower(nn.Module):
    """Blocks; the root computes with the first one's weight, too, and the second block with the third one's bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.raises = False
        self.in_backward = False
        third = [self.blocks[2]]
        self.blocks[1].register_forward_hook(lambda _module, _args, output: output + third[0].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        hidden = functional.linear(hidden, self.blocks[0].weight)
        if self.raises:
            raise RuntimeError("in forward")
        if self.in_backward:
            hidden = Squared.apply(hidden, [self.blocks[1]])
        return hidden.square().mean()


def hidden_input(step: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module, *, steps: int = 1) -> dict[str, torch.Tensor]:
    """Of several backwards that add up."""
    for step in range(steps):
        model(hidden_input(step)).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def offloaded_gradients(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    for step in range(options.get("steps", 1)):
        model(hidden_input(step)).backward()
    return held(model)


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients, block by block, as the least window has it."""
    found = {}
    for name, block in model.named_children():
        for number, part in enumerate(block):
            with zo.full_params(part, grads=True):
                grads = {key: param.grad.clone() for key, param in part.named_parameters() if param.grad is not None}
            found |= {f"{name}.{number}.{key}": grad for key, grad in grads.items()}
    return found


def backward(model: nn.Module, tokens: torch.Tensor) -> nn.Module:
    model(tokens).backward()
    return model


def whole_gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    with zo.full_params(backward(model, tokens), grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


def grow(embedding: nn.Embedding) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.cat([embedding.weight.detach(), torch.ones(8, 16)]), freeze=False)


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_module_computes_with_another_ones_parameters(offload: Offload, tier: str, *, in_backward: bool) -> None:
    model, plain = offload(Borrower(), tier), Borrower()
    model.in_backward = plain.in_backward = in_backward
    assert_same(offloaded_gradients(model, steps=3), gradients(plain, steps=3))


def test_what_is_borrowed_is_held_for_the_backward_too(offload: Offload) -> None:
    """The window has room for what the root and the second block borrow, and for one block: others come and go."""
    memory = {"gradients": "host", "device_memory": 3 * BLOCK_NBYTES}
    model, plain = offload(Borrower(), "nvme", **memory), Borrower()
    assert_same(offloaded_gradients(model, steps=3), gradients(plain, steps=3))


def test_a_window_that_does_not_hold_what_is_borrowed_is_told_by_how_much(offload: Offload) -> None:
    model = offload(Borrower(), "nvme", gradients="host", device_memory=2 * BLOCK_NBYTES)
    loss = model(hidden_input())
    with pytest.raises(
        zo.BudgetError, match=rf"in use at the same time: blocks\.0, blocks\.2.*by {BLOCK_NBYTES} bytes"
    ):
        loss.backward()


def test_a_forward_that_raises_after_borrowing_can_be_called_again(offload: Offload) -> None:
    model, plain = offload(Borrower(), "nvme"), Borrower()
    model.raises = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in forward"):
            model(hidden_input())
    model.raises = False
    assert_same(offloaded_gradients(model), gradients(plain))


def test_a_penalty_outside_of_the_forward_counts_where_parameters_are_on_the_device(offload: Offload) -> None:
    model, plain = offload(Borrower(), "host"), Borrower()
    for net in (model, plain):
        for step in range(3):
            penalty = sum(param.square().sum() for param in net.parameters())
            (net(hidden_input(step)) + 0.1 * penalty).backward()
        penalty = sum(param.square().sum() for param in net.parameters())
        penalty.backward()
    assert_same(held(model), {name: param.grad for name, param in plain.named_parameters()})


def test_a_penalty_outside_of_the_forward_is_refused_where_they_are_away(offload: Offload) -> None:
    model = offload(Borrower(), "nvme")
    model(hidden_input())
    with pytest.raises(zo.ConfigError, match=r"blocks\.0\.weight was used outside.*in the forward of a module"):
        sum(param.square().sum() for param in model.parameters())


def test_a_model_computes_with_no_other_models_parameters(offload: Offload, make_net: Any, tmp_path: Path) -> None:
    """Each run knows its own modules alone."""
    teacher = offload(make_net(), "nvme")
    folder = tmp_path / "student"
    folder.mkdir()
    student = offload(Borrower(), "nvme", nvme_paths=[folder])
    student.blocks[2].register_forward_hook(lambda *_: teacher.head.weight.sum())
    with pytest.raises(zo.ConfigError, match=r"head\.weight was used outside of the model's forward"):
        student(hidden_input())


def test_a_model_can_be_entered_at_a_module_inside(offload: Offload, make_net: Any, tier: str) -> None:
    """The root, whose unit has the head's parameters, is not called."""
    model, plain = offload(make_net(), tier), make_net()
    for net in (model, plain):
        for step in range(2):
            hidden = net.layers[0](hidden_input(step))
            net.head(hidden).square().mean().backward()
    with zo.full_params(model, grads=True):
        ours = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    assert_same(ours, {name: param.grad for name, param in plain.named_parameters() if param.grad is not None})
    with torch.no_grad():
        assert torch.equal(model.unembed(hidden_input()), plain.unembed(hidden_input()))


def replace(net: nn.Module) -> None:
    net.embed = nn.Embedding(40, 16)


def add(net: nn.Module) -> None:
    net.layers[1].register_parameter("adapter", nn.Parameter(torch.ones(2)))


def take_away(net: nn.Module) -> None:
    net.head.bias = None


class Twice(nn.Module):
    """Calls a block twice, each time in a checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = checkpoint(self.blocks[0], hidden, use_reentrant=self.use_reentrant)
        return self.blocks[1](hidden).square().mean()


def test_reentrant_checkpoints_that_share_a_parameter_are_refused(offload: Offload, tier: str) -> None:
    """Each adds to its gradient in a backward of its own, and the first part has left by then."""
    model = offload(Twice(use_reentrant=True), tier)
    loss = model(hidden_input().requires_grad_())
    with pytest.raises(zo.ConfigError, match=r"blocks\.0\.\w+ got two gradients.*use_reentrant=False"):
        loss.backward()


def test_checkpoints_may_share_a_parameter(offload: Offload, tier: str) -> None:
    model, plain = offload(Twice(use_reentrant=False), tier), Twice(use_reentrant=False)
    assert_same(offloaded_gradients(model, steps=2), gradients(plain, steps=2))


@pytest.mark.parametrize("change", [replace, add, take_away])
def test_a_model_whose_parameters_are_others_is_refused(
    offload: Offload, make_net: Any, tokens: torch.Tensor, tier: str, change: Callable[[nn.Module], None]
) -> None:
    model = offload(make_net(), tier)
    model(tokens)
    change(model)
    for training in (True, False):
        with torch.set_grad_enabled(training), pytest.raises(zo.ConfigError, match=r"call zo\.close\(model\)"):
            model(tokens)


def test_a_model_is_changed_between_two_runs(offload: Offload, make_net: Any, tokens: torch.Tensor, tier: str) -> None:
    """As the error says: embeddings get more rows."""
    model, plain = offload(make_net(), tier), make_net()
    state = model.state_dict()
    zo.close(model)
    grown = make_net(seed=1)
    for net in (grown, plain):
        net.embed = grow(net.embed)
    state["embed.weight"] = torch.cat([state["embed.weight"], torch.ones(8, 16)])
    grown.load_state_dict(state)
    offload(grown, tier)
    assert torch.equal(grown(tokens + 30), plain(tokens + 30))
    assert_same(
        whole_gradients(grown, tokens + 30),
        {name: param.grad for name, param in backward(plain, tokens + 30).named_parameters()},
    )
