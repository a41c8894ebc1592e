"""Boxes of a tensor, and elements counted row by row. Pure.

torch.distributed.checkpoint cuts tensors into boxes, `offsets` and `sizes` in every dimension; a flat buffer cuts them
into ranges of elements.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self


@dataclass(frozen=True)
class Box:
    """A part of a tensor of a shape."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_all(cls, shape: Sequence[int]) -> Self:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @property
    def is_inside(self) -> bool:
        """Whether it is a box of that tensor."""
        return len(self.shape) == len(self.offsets) == len(self.sizes) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for length, offset, size in zip(self.shape, self.offsets, self.sizes, strict=True)
        )

    @cached_property
    def run_numel(self) -> int:
        """Elements of the box that follow each other in the tensor, too."""
        numel = 1
        for length, size in zip(reversed(self.shape), reversed(self.sizes), strict=True):
            numel *= size
            if size != length:
                break
        return numel

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What of the tensor's elements `[start, stop)` is in the box, in rising order.

        Yields
        ------
        tuple[int, int, int]
            First element in the tensor, first element in the box, elements.
        """
        if not self.numel:
            return
        count = self.numel // self.run_numel
        first = max(0, bisect_right(range(count), start, key=self._run_start) - 1)
        for number in range(first, count):
            begin = self._run_start(number)
            if begin >= stop:
                return
            low, high = max(begin, start), min(begin + self.run_numel, stop)
            if low < high:
                yield low, number * self.run_numel + low - begin, high - low

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where in the tensor the box's elements `[start, stop)` lie, in rising order.

        Yields
        ------
        tuple[int, int, int]
            First element in the tensor, first element in the box, elements.
        """
        if start >= stop:
            return
        for number in range(start // self.run_numel, -(-stop // self.run_numel)):
            begin = number * self.run_numel
            low, high = max(begin, start), min(begin + self.run_numel, stop)
            yield self._run_start(number) + low - begin, low, high - low

    def overlaps(self, other: Box) -> bool:
        """Whether an element is in both."""
        return all(
            max(first, another) < min(first + size, another + length)
            for first, size, another, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def _run_start(self, number: int) -> int:
        """Where in the tensor a run begins."""
        element = number * self.run_numel
        place, stride = 0, 1
        for length, offset, size in zip(
            reversed(self.shape), reversed(self.offsets), reversed(self.sizes), strict=True
        ):
            element, index = divmod(element, size)
            place += (offset + index) * stride
            stride *= length
        return place


def boxes_in(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The fewest boxes of the tensor, in rising order, that hold the elements `[start, stop)` of a box of it."""
    for inner in boxes_of(box.sizes, start, stop):
        offsets = (outer + offset for outer, offset in zip(box.offsets, inner.offsets, strict=True))
        yield Box(box.shape, tuple(offsets), inner.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The fewest boxes, in rising order, that hold the elements `[start, stop)` of a tensor of that shape."""
    shape = tuple(shape)
    if start >= stop:
        return
    if not shape:
        yield Box((), (), ())
        return
    row_numel = math.prod(shape[1:])
    first, last = -(-start // row_numel), stop // row_numel
    if first > last:
        # Within one row.
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row_numel)
    if first < last:
        yield Box(shape, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row_numel, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    base = row * math.prod(shape[1:])
    for box in boxes_of(shape[1:], start - base, stop - base):
        yield Box(shape, (row, *box.offsets), (1, *box.sizes))
