"""What is made of stored tensors holds the elements that torch's operations give, in whatever pieces it is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload import CheckpointError
from zerooffload.checkpoint.stored_tensor import Copies, Joined, Reshaped, Rows, Section, StoredTensor, read_whole


class InMemory:
    """A stored tensor that is none; it refuses reads beyond its elements, and empty ones."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._flat = tensor.reshape(-1)
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    def read(self, first: int, target: torch.Tensor) -> None:
        assert 0 <= first < first + target.numel() <= len(self._flat)
        target.copy_(self._flat[first : first + target.numel()])


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


A, B, C = numbers(3, 2, 4), numbers(3, 5, 4, start=100), numbers(3, 0, 4)
PERMUTED = [2, 0, 1]
MADE: dict[str, tuple[Callable[[], StoredTensor], torch.Tensor]] = {
    "joined": (lambda: Joined([InMemory(A), InMemory(C), InMemory(B)], 1), torch.cat([A, C, B], 1)),
    "joined rows": (lambda: Joined([InMemory(A), InMemory(A)], 0), torch.cat([A, A])),
    "joined columns": (lambda: Joined([InMemory(A), InMemory(A)], 2), torch.cat([A, A], 2)),
    "stacked": (lambda: Joined([Reshaped(InMemory(A), (3, 1, 2, 4))] * 3, 1), torch.stack([A] * 3, 1)),
    "section": (lambda: Section(InMemory(B), 1, 1, 4), B[:, 1:4]),
    "section of rows": (lambda: Section(InMemory(B), 0, 2, 3), B[2:]),
    "section of columns": (lambda: Section(InMemory(B), 2, 1, 3), B[..., 1:3]),
    "section of joined": (
        lambda: Section(Joined([InMemory(A), InMemory(B)], 1), 1, 1, 6),
        torch.cat([A, B], 1)[:, 1:6],
    ),
    "rows": (lambda: Rows(InMemory(B), PERMUTED), B[PERMUTED]),
    "copies": (lambda: Copies([InMemory(B), InMemory(B.clone())], "B"), B),
    "scalar": (lambda: Reshaped(InMemory(numbers(1)), ()), numbers(1).reshape(())),
}


@pytest.mark.parametrize("name", list(MADE))
@given(data=st.data())
def test_any_piece_is_that_of_torch(name: str, data: st.DataObject) -> None:
    make, expected = MADE[name]
    tensor = make()
    assert tensor.shape == tuple(expected.shape)
    assert torch.equal(read_whole(tensor), expected)
    first = data.draw(st.integers(0, expected.numel() - 1))
    stop = data.draw(st.integers(first + 1, expected.numel()))
    piece = torch.full((stop - first,), torch.nan)
    tensor.read(first, piece)
    assert torch.equal(piece, expected.reshape(-1)[first:stop])


def test_copies_are_compared_by_their_bytes() -> None:
    with_nan = torch.tensor([1.0, torch.nan])
    assert read_whole(Copies([InMemory(with_nan), InMemory(with_nan.clone())], "A")).isnan().tolist() == [False, True]
    with pytest.raises(CheckpointError, match="A, which is one tensor to the model, holds different values"):
        read_whole(Copies([InMemory(torch.zeros(1)), InMemory(-torch.zeros(1))], "A"))
