"""What a parameter's values are before it is trained, wherever they are now: in memory, or in a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from zerooffload.checkpoint.stored_tensor import StoredTensor

_PIECE_NUMEL = 1 << 18
"""Elements that are read at once to be converted: 1 MiB of fp32."""


class InitialValues(Protocol):
    """A parameter's values, counted row by row.

    Attributes
    ----------
    dtype : torch.dtype
        In which they are.
    """

    @property
    def dtype(self) -> torch.dtype:
        """See above."""

    def copy_to(self, target: torch.Tensor, first: int) -> None:
        """Elements `[first, first + target.numel())` in the dtype of `target`, which is 1D."""

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        """Elements `[first, stop)`, piece by piece; each piece is valid until the next is asked for."""


class ValuesInMemory:
    """Those of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._flat = tensor.detach().reshape(-1)
        self.dtype = tensor.dtype

    def copy_to(self, target: torch.Tensor, first: int) -> None:
        """See `InitialValues`."""
        target.copy_(self._flat[first : first + target.numel()])

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        """See `InitialValues`."""
        yield self._flat[first:stop]


class StoredValues:
    """Those of a stored tensor: read straight into their place where that is host memory of the same dtype."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def copy_to(self, target: torch.Tensor, first: int) -> None:
        """See `InitialValues`."""
        if target.dtype is self.dtype and target.device.type == "cpu":
            self._tensor.read(first, target)
            return
        done = 0
        for piece in self.pieces(first, first + target.numel()):
            target[done : done + piece.numel()].copy_(piece)
            done += piece.numel()

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        """See `InitialValues`."""
        buffer = torch.empty(min(_PIECE_NUMEL, stop - first), dtype=self.dtype)
        for start in range(first, stop, _PIECE_NUMEL):
            piece = buffer[: stop - start]
            self._tensor.read(start, piece)
            yield piece
