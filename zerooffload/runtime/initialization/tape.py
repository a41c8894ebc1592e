"""What is recorded: operations on tensors without memory, and which of them a tensor's content comes from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Place:
    """Where a recorded tensor lies: `storage` is the tape's key of a storage, `offset` and `stride` count elements."""

    storage: int
    storage_nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_contiguous: bool

    @property
    def is_whole(self) -> bool:
        """Whether it takes all of its storage."""
        return self.shape.numel() * self.dtype.itemsize == self.storage_nbytes


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation, with places where it had tensors.

    Attributes
    ----------
    made : list[Place | None]
        For each of the results, its place if it has a storage of its own.
    reads : frozenset[int]
        Storages whose content plays a part.
    writes : list[Place]
        What changes, and what is made.
    draws : bool
        Whether it takes from the generator.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Place | None]
    reads: frozenset[int]
    writes: list[Place]
    draws: bool
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


class Tape:
    """Operations in their order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}
        # Kept alive: a key is a storage's address.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor lies; the tape knows its storage from now on."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        self._storages[key] = storage
        return Place(
            storage=key,
            storage_nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            is_contiguous=tensor.is_contiguous(),
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values come from the tape."""
        # While recording, `is_meta` is false.
        return tensor.device.type == "meta" or storage_key(tensor) in self._storages

    def append(self, operation: Operation) -> None:
        """Add an operation."""
        for storage in {place.storage for place in operation.writes}:
            self._writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(operation)

    def forget(self, start: int) -> None:
        """Take back everything from an operation on."""
        del self.operations[start:]
        for writers in self._writers.values():
            del writers[bisect_left(writers, start) :]

    def is_written(self, storage: int) -> bool:
        """Whether any operation gave it values."""
        return bool(self._writers.get(storage))

    def needed(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """The operations, in their order, from which storages have their content (at a point of the tape)."""
        end = len(self.operations) if before is None else before
        wanted = [(storage, end) for storage in storages]
        found: set[int] = set()
        while wanted:
            storage, end = wanted.pop()
            writers = self._writers.get(storage, [])
            number = bisect_left(writers, end)
            if number and writers[number - 1] not in found:
                last = writers[number - 1]
                found.add(last)
                wanted += [(read, last) for read in self.operations[last].reads]
        return sorted(found)


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages apart: on meta, `data_ptr()` is zero for all of them."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in an operation's arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype, for what is made without one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
