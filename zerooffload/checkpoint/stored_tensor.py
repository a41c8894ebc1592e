"""Tensors that are read where they lie, slice by slice: those of files, and what is made of them without arithmetic.

Elements are counted row by row, so a reshaped tensor is the same elements under another shape.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from zerooffload.errors import CheckpointError


class StoredTensor(Protocol):
    """A tensor outside of memory.

    Attributes
    ----------
    dtype : torch.dtype
    shape : tuple[int, ...]
    """

    @property
    def dtype(self) -> torch.dtype:
        """See above."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See above."""

    def read(self, first: int, target: torch.Tensor) -> None:
        """Read elements `[first, first + target.numel())` into host memory, 1D and contiguous, of the tensor's dtype.

        Raises
        ------
        CheckpointError
            If they cannot be read.
        """


def read_whole(tensor: StoredTensor) -> torch.Tensor:
    """A tensor in memory of its own."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.read(0, whole.view(-1))
    return whole


def is_possible(shape: Sequence[int]) -> bool:
    """Whether torch has tensors of a shape: one without elements has strides, too."""
    return math.prod(length or 1 for length in shape) < 1 << 63


class Reshaped:
    """The same elements under another shape."""

    def __init__(self, whole: StoredTensor, shape: Sequence[int]) -> None:
        self._whole = whole
        self.dtype = whole.dtype
        self.shape = tuple(shape)

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        self._whole.read(first, target)


class Section:
    """Indices `[start, stop)` of a dimension."""

    def __init__(self, whole: StoredTensor, dim: int, start: int, stop: int) -> None:
        self._whole = whole
        self.dtype = whole.dtype
        self.shape = (*whole.shape[:dim], stop - start, *whole.shape[dim + 1 :])
        row_numel = math.prod(whole.shape[dim + 1 :])
        self._start_numel = start * row_numel
        self._run_numel = (stop - start) * row_numel
        self._whole_numel = whole.shape[dim] * row_numel

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        for index, column, part in _runs(first, target, self._run_numel):
            self._whole.read(index * self._whole_numel + self._start_numel + column, part)


class Joined:
    """Tensors of one dtype, one behind the other along a dimension."""

    def __init__(self, parts: Sequence[StoredTensor], dim: int) -> None:
        self._parts = parts
        self.dtype = parts[0].dtype
        before, behind = parts[0].shape[:dim], parts[0].shape[dim + 1 :]
        self.shape = (*before, sum(part.shape[dim] for part in parts), *behind)
        self._runs_numel = [part.shape[dim] * math.prod(behind) for part in parts]
        self._starts = list(accumulate(self._runs_numel, initial=0))

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        for index, column, run in _runs(first, target, self._starts[-1]):
            done = 0
            while done < run.numel():
                number = bisect_right(self._starts, column + done) - 1
                place = column + done - self._starts[number]
                piece = run[done : done + self._runs_numel[number] - place]
                self._parts[number].read(index * self._runs_numel[number] + place, piece)
                done += piece.numel()


class Rows:
    """Rows, along the first dimension, in another order: row `number` is row `order[number]` of `whole`."""

    def __init__(self, whole: StoredTensor, order: Sequence[int]) -> None:
        self._whole = whole
        self._order = order
        self.dtype = whole.dtype
        self.shape = whole.shape
        self._row_numel = math.prod(whole.shape[1:])

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        for number, column, part in _runs(first, target, self._row_numel):
            self._whole.read(self._order[number] * self._row_numel + column, part)


class Copies:
    """One tensor that is stored under several names; they are compared as they are read."""

    def __init__(self, copies: Sequence[StoredTensor], what: str) -> None:
        self._first, *self._others = copies
        self._what = what
        self.dtype = self._first.dtype
        self.shape = self._first.shape

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        self._first.read(first, target)
        for other in self._others:
            copy = torch.empty_like(target)
            other.read(first, copy)
            if not torch.equal(copy.view(torch.uint8), target.view(torch.uint8)):
                raise CheckpointError(f"{self._what}, which is one tensor to the model, holds different values")


def _runs(first: int, target: torch.Tensor, run_numel: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut elements from `first` on where runs of a length end: (number of the run, place in it, part of `target`)."""
    done = 0
    while done < target.numel():
        number, place = divmod(first + done, run_numel)
        part = target[done : done + run_numel - place]
        yield number, place, part
        done += part.numel()
