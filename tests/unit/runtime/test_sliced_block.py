"""A block in slices, beside the same block at once. Numbers are small integers: sums are exact in any order."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.errors import ConfigError
from zerooffload.runtime.sliced_block import SlicedBlock, Slicing
from zerooffload.runtime.sliced_call import KeptByAutograd
from zerooffload.runtime.slicing import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH, WIDTH, HEADS = 4, 3, 5, 2


class KeptForTests(KeptByAutograd):
    """Counts what is kept."""

    def __init__(self, held: list[int]) -> None:
        self._held = held

    def release(self) -> None:
        self._held[0] -= 1


def in_slices(
    module: nn.Module, size: int | None, declared: dict[str, Rule] | None = None, held: list[int] | None = None
) -> SlicedBlock:
    held = held if held is not None else [0]

    def keep(_: torch.Tensor) -> KeptForTests:
        held[0] += 1
        return KeptForTests(held)

    slicing = Slicing(
        micro_batch_size=size, declared=declared or {}, accelerator=CpuAccelerator(), between_slices=lambda: None
    )
    block = SlicedBlock("layers.0", module, slicing, keep)
    block.install()
    return block


def integers(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float().requires_grad_(grad)


@dataclass
class Result:
    hidden: torch.Tensor
    bias: torch.Tensor
    more: dict[str, Any]


class Block(nn.Module):
    """Uses arguments of all kinds; what it makes of them is a polynomial, so exact."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.empty(1, HEADS, LENGTH, LENGTH))
        self.frozen = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.num_calls = 0
        for param in self.parameters():
            param.data = integers(*param.shape)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        states: torch.Tensor | None = None,
        *,
        rotary: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None = None,
        flag: bool = True,
    ) -> Result:
        cos, sin = rotary
        x = self.inner(hidden * cos + sin) + self.frozen
        if states is not None:
            x = x + states.sum(1, keepdim=True)
        own = self.bias if bias is None else bias + self.bias
        scores = own.sum(1) * mask[:, 0]
        y = scores @ x if flag else x
        rows = y.reshape(-1, WIDTH)
        return Result(hidden + y, own, {"rows": rows, "none": None, "tuple": (rows.argmax(-1), 7)})


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(3)
    mask = torch.randint(0, 2, (BATCH, 1, LENGTH, LENGTH))
    args = (integers(BATCH, LENGTH, WIDTH, grad=True), mask, integers(BATCH, 2, WIDTH, grad=True))
    rotary = (integers(1, LENGTH, WIDTH, grad=True), integers(LENGTH, WIDTH))
    return args, {"rotary": rotary, "bias": integers(1, HEADS, LENGTH, LENGTH, grad=True)}


def gradients(module: nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor | None]:
    result = module(*args, **kwargs)
    weights = torch.arange(BATCH).view(BATCH, 1, 1)
    ((result.hidden * weights).sum() + 2 * result.bias.sum() + result.more["rows"].square().sum()).backward()
    found: dict[str, torch.Tensor | None] = {
        "hidden": args[0].grad,
        "states": args[2].grad,
        "cos": kwargs["rotary"][0].grad,
        "bias": kwargs["bias"].grad,
        **{name: param.grad for name, param in module.named_parameters()},
    }
    found |= {"output": result.hidden, "rows": result.more["rows"], "argmax": result.more["tuple"][0]}
    return found


@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_all_kinds_of_arguments_and_outputs(size: int | None) -> None:
    torch.manual_seed(2)
    block = Block()
    plain = gradients(block, *arguments())
    block.zero_grad()
    held = [0]
    in_slices(block, size, held=held)
    args, kwargs = arguments()
    sliced = gradients(block, args, kwargs)
    assert held == [0]
    for name, expected in plain.items():
        found = sliced[name]
        if expected is None:
            assert found is None, name
        else:
            assert found is not None, name
            assert torch.equal(found, expected), name
    result = block(*args, **kwargs)
    assert (result.more["none"], result.more["tuple"][1]) == (None, 7)
    assert not result.more["tuple"][0].requires_grad


class AwayForTests(KeptByAutograd):
    """Has a copy."""

    is_away = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().clone()

    def bring(self) -> torch.Tensor:
        return self._copy


class Nested(nn.Module):
    """Its input comes in containers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: list[dict[str, Any]], *, more: Any = None) -> torch.Tensor:
        hidden = first[0]["value"].hidden
        return self.inner(hidden if more is None else hidden + more[0])


def test_an_input_that_went_away_is_held_by_nothing() -> None:
    block, before = Nested(), integers(BATCH, WIDTH, grad=True)
    block.inner.weight.data = integers(WIDTH, WIDTH)
    slicing = Slicing(micro_batch_size=2, declared={}, accelerator=CpuAccelerator(), between_slices=lambda: None)
    SlicedBlock("layers.0", block, slicing, AwayForTests).install()
    hidden = before * 2
    gone = weakref.ref(hidden)
    output = block([{"value": Result(hidden, torch.ones(()), {})}], more=(torch.ones(1, WIDTH),))
    del hidden
    assert gone() is None
    output.sum().backward()
    assert before.grad is not None
    assert torch.equal(before.grad, (2 * block.inner.weight.sum(0)).expand(BATCH, WIDTH))


def test_gradients_of_bf16_parameters_add_up_in_fp32() -> None:
    """Above 256 the next bf16 is 258: in bf16 each 256 + 1 is 256 again."""
    block = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    in_slices(block, 1)
    block(torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)).sum().backward()
    assert block.weight.grad is not None
    assert block.weight.grad.dtype is torch.bfloat16
    assert block.weight.grad.item() == 260.0


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(self.inner(hidden).tanh(), 0.5)
        return hidden + nn.functional.dropout(dropped.square(), 0.5)


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_has_the_masks_of_checkpointed_slices(size: int) -> None:
    torch.manual_seed(1)
    block, hidden = Drops(), torch.randn(BATCH, WIDTH, requires_grad=True)
    forward = block.forward

    def by_hand(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in whole.split(size)])

    found = []
    for run in (by_hand, block):
        if run is block:
            in_slices(block, size)
        torch.manual_seed(5)
        output = run(hidden)
        drawn = torch.rand(1)
        output.square().sum().backward()
        after = torch.rand(1)
        grads = [hidden.grad, *(param.grad for param in block.parameters())]
        found.append([output, drawn, after, *grads])
        hidden.grad = None
        block.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Routed(nn.Module):
    """A block with a router whose output only hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.router.weight.data = integers(2, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden.reshape(-1, WIDTH))
        return hidden * logits.sum(-1).view(hidden.shape[:2])[..., None]


def test_hooks_inside_see_the_whole_batch_once_with_its_gradient() -> None:
    torch.manual_seed(6)
    block, hidden = Routed(), integers(BATCH, LENGTH, WIDTH, grad=True)
    seen: list[torch.Tensor] = []
    block.router.register_forward_hook(lambda _module, _args, output: seen.append(output))
    block.router.register_forward_hook(lambda _m, _a, _k, output: seen.append(output), with_kwargs=True)
    found = []
    for size in (None, 2):
        if size is not None:
            in_slices(block, size)
        output = block(hidden)
        (output.sum() + seen[0].square().sum()).backward()
        found.append([output, *seen, hidden.grad, block.router.weight.grad])
        assert len(seen) == 2
        seen.clear()
        hidden.grad = block.router.weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_hook_that_replaces_an_output_is_refused() -> None:
    block = Routed()
    block.router.register_forward_hook(lambda _module, _args, output: output + 1)
    in_slices(block, 2)
    with pytest.raises(ConfigError, match=r"layers\.0.*hook of its Linear replaces"):
        block(integers(BATCH, LENGTH, WIDTH, grad=True))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.sizes: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden))
        return self.inner(hidden).tanh()


def test_without_gradients_or_in_evaluation_the_block_runs_at_once() -> None:
    block, hidden = Counts(), torch.ones(BATCH, WIDTH)
    sliced = in_slices(block, 2)
    with torch.no_grad():
        block(hidden)
    block.eval()
    block(hidden)
    assert block.sizes == [BATCH, BATCH]
    block.train()
    block.sizes.clear()
    block(hidden).sum().backward()
    # The trial's one sample, and three times two; forward; backward.
    assert block.sizes == [1, 2, 2, 2, 2, 2, 2, 2]
    block.sizes.clear()
    block(hidden)
    assert block.sizes == [2, 2]
    sliced.remove()
    assert "forward" not in vars(block)


def test_a_graph_can_be_kept() -> None:
    block, hidden = nn.Linear(WIDTH, WIDTH), torch.ones(BATCH, WIDTH)
    in_slices(block, 2)
    loss = block(hidden).sum()
    loss.backward(retain_graph=True)
    assert block.weight.grad is not None
    once = block.weight.grad.clone()
    loss.backward()
    assert torch.equal(block.weight.grad, 2 * once)


def test_an_input_that_was_written_to_is_found_out() -> None:
    block, hidden = nn.Linear(WIDTH, WIDTH), torch.ones(BATCH, WIDTH)
    in_slices(block, 2)
    output = block(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(4)
    block, hidden = nn.Linear(WIDTH, WIDTH), torch.randn(BATCH, WIDTH)
    grads = []
    for size in (None, BATCH):
        if size is not None:
            in_slices(block, size)
        with torch.autocast("cpu", torch.bfloat16):
            output = block(hidden)
        assert output.dtype is torch.bfloat16
        output.float().square().sum().backward()
        assert block.weight.grad is not None
        grads.append(block.weight.grad.clone())
        block.zero_grad()
    assert torch.equal(*grads)


class Lambda(nn.Module):
    """A block that does something else beside its product."""

    def __init__(self, action: Callable[[Lambda, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.last: Any = None
        self.action = action

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.action(self, self.inner(hidden))


def counting(block: Lambda, x: torch.Tensor) -> torch.Tensor:
    block.seen.add_(1)
    return x


def caching(block: Lambda, x: torch.Tensor) -> torch.Tensor:
    block.last = x.detach()
    return x


def of_another(x: torch.Tensor) -> torch.Tensor:
    return x + FOREIGN


FOREIGN = nn.Parameter(torch.ones(WIDTH))


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda _, x: x - x.mean(0), "mixes samples.*dimension 0 of hidden"),
        (lambda _, x: (x, x.square().mean()), "mixes samples"),
        (lambda _, x: x.cumsum(0).flip(0), "mixes samples"),
        (lambda _, x: x + torch.ones(len(x) // 2 + 1, 1).sum() * x[:1], "mixes samples"),
        (
            lambda _, x: x[:, None].expand(len(x), len(x), WIDTH),
            r"returns a tensor of shape \(1, 1, 5\) for one sample",
        ),
        (lambda _, x: [x] * len(x), "another number of tensors"),
        (lambda _, x: x + torch.ones(BATCH, WIDTH)[: 1 if len(x) == 1 else BATCH], r"cannot run on 2 of 4 samples"),
        (lambda _, x: of_another(x), r"uses a parameter of shape \(5,\) that is not in its module"),
        (counting, "changes seen in its forward"),
        (caching, "changes last in its forward"),
    ],
    ids=[
        *("mean", "scalar", "along the batch", "first sample", "square", "list"),
        *("fixed size", "foreign parameter", "buffer", "attribute"),
    ],
)
def test_what_cannot_be_sliced_is_refused(action: Callable[..., Any], words: str) -> None:
    block = Lambda(action)
    in_slices(block, 2)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=rf"unit layers\.0 .*{words}"):
        block(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_statistics_of_the_batch_are_refused() -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    in_slices(block, 2)
    with pytest.raises(ConfigError, match=r"has a BatchNorm1d \(1\), whose statistics are of the whole batch"):
        block(torch.randn(BATCH, WIDTH))
    assert block[1].num_batches_tracked == 0


def test_gradient_checkpointing_and_gradient_hooks_are_refused() -> None:
    block = nn.Linear(WIDTH, WIDTH)
    in_slices(block, 2)
    block.gradient_checkpointing = True
    with pytest.raises(ConfigError, match="gradient checkpointing on"):
        block(torch.randn(BATCH, WIDTH))
    block.gradient_checkpointing = False
    handle = block.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ConfigError, match="hook on the gradient of weight"):
        block(torch.randn(BATCH, WIDTH))
    handle.remove()
    block(torch.randn(BATCH, WIDTH))


def test_what_is_returned_must_not_depend_on_the_data() -> None:
    block = Lambda(lambda _, x: x[:1] if bool((x > 100).any()) else x)
    block.inner = nn.Identity()
    in_slices(block, 2)
    with pytest.raises(ConfigError, match=r"shape \(1, 5\) for one slice and \(2, 5\) for another"):
        block(torch.tensor([0.0, 0.0, 200.0, 0.0])[:, None].expand(BATCH, WIDTH))
