"""A head and its loss in slices. Numbers are small integers where bits are compared: sums are exact in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerooffload as zo

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 3, 5, 17


def integer_head() -> nn.Linear:
    torch.manual_seed(1)
    head = nn.Linear(WIDTH, VOCABULARY)
    for param in head.parameters():
        param.data = torch.randint(-2, 3, param.shape).float()
    return head


def squares(logits: torch.Tensor, targets: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    return (weight * (logits.sum(-1) - targets)).square().sum()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(2)).float()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_equal_to_the_loss_at_once(size: int) -> None:
    head, targets = integer_head(), integers(BATCH, LENGTH)
    found = []
    for sliced in (False, True):
        hidden, weight = integers(BATCH, LENGTH, WIDTH).requires_grad_(), integers(LENGTH).requires_grad_()
        if sliced:
            loss = zo.sliced_loss(head, squares, micro_batch_size=size)(hidden, targets, weight=weight)
        else:
            loss = squares(head(hidden), targets, weight=weight)
        (loss / 4).backward()
        found.append([loss, hidden.grad, weight.grad, *(param.grad for param in head.parameters())])
        head.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert "forward" not in vars(head)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[-1] == VOCABULARY:
                self.numel = max(self.numel, leaf.numel())
        return result


def test_no_logits_of_more_than_a_slice_exist() -> None:
    head, targets = integer_head(), torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    total = zo.sliced_loss(head, token_losses, micro_batch_size=2)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with Largest() as largest:
        total(hidden, targets).backward()
    assert largest.numel == 2 * LENGTH * VOCABULARY
    with Largest() as largest, torch.no_grad():
        total(hidden, targets)
    assert largest.numel == 2 * LENGTH * VOCABULARY


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda logits, targets: (logits.sum(-1) - targets).square().mean(), r"must return the sum.*reduction=\"sum\""),
        (lambda logits, targets: (logits.sum(-1) - targets).square(), "must return one number"),
    ],
    ids=["mean", "no sum"],
)
def test_a_loss_that_is_no_sum_is_refused(loss_fn: Callable[..., torch.Tensor], words: str) -> None:
    with pytest.raises(zo.ConfigError, match=words):
        zo.sliced_loss(integer_head(), loss_fn, micro_batch_size=2)(
            torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)), torch.ones(BATCH, LENGTH)
        )


def test_misuse_is_refused() -> None:
    head, hidden, targets = integer_head(), torch.ones(BATCH, LENGTH, WIDTH), torch.ones(BATCH, LENGTH)
    with pytest.raises(zo.ConfigError, match=r"hidden has 8 samples, which micro_batch_size=3 does not"):
        zo.sliced_loss(head, squares, micro_batch_size=3)(hidden, targets, weight=torch.ones(LENGTH))
    with pytest.raises(zo.ConfigError, match=r"targets\[0\] of shape \(5, 3\).*neither 8 samples"):
        zo.sliced_loss(head, squares, micro_batch_size=2)(hidden, targets[:5], weight=torch.ones(LENGTH))
    with pytest.raises(zo.ConfigError, match="how many samples a slice has"):
        zo.sliced_loss(head, squares)(hidden, targets, weight=torch.ones(LENGTH))
    assert "forward" not in vars(head)
