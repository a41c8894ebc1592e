"""How parameters lie in a flat buffer. Pure.

[Note: flat buffers]
A unit's parameters of one dtype and one `requires_grad` lie in one flat buffer, each starting on 64 bytes (a cache
line, and the alignment that vector code likes), in the order in which the model names them. The buffer is padded so
that every rank's shard is of one length, and with several ranks starts on 4096 bytes. Padding is zero, and an update
leaves it zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zerooffload.formats import round_up

SLOT_ALIGNMENT_BYTES = 64
SHARD_ALIGNMENT_BYTES = 4096
"""Of shards of several ranks: direct I/O goes straight into a shard's place in the whole buffer."""


@dataclass(frozen=True)
class Cut:
    """Where a part of a parameter lies in it: the whole's shape, and the part's first index in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it: its first name, its other names (tied weights), and its shape.

    Of one that tensor parallelism has cut it is a rank's part that has this shape; `cut` says which.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    cut: Cut | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the parameter, whatever this rank has of it."""
        return self.shape if self.cut is None else self.cut.shape

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the first one first."""
        return (self.name, *self.aliases)

    @cached_property
    def numel(self) -> int:
        """Elements."""
        numel = 1
        for length in self.shape:
            numel *= length
        return numel


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: elements `[start, stop)` of the flat buffer."""

    param: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return self.start + self.param.numel


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer.

    Attributes
    ----------
    name : str
        Of the unit and the kind of parameters, for messages.
    dtype : torch.dtype
        The compute dtype of all its parameters.
    trainable : bool
        Whether they require gradients.
    slots : tuple[Slot, ...]
    world_size : int
        Ranks that share the buffer.
    block_numel : int
        Elements that must not be cut apart: parameters and shards start on multiples of it.
    counts : bool
        Whether the elements count in the model's norm; those that are another rank's too, outside of the ranks that
        share the buffer, count there if not here.
    """

    name: str
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    world_size: int
    block_numel: int = 1
    counts: bool = True

    @property
    def signature(self) -> tuple[torch.dtype, bool, int, int]:
        """The same for buffers that hold as much of the same, whatever their parameters' names and shapes."""
        return self.dtype, self.trainable, self.numel, self.world_size

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.world_size

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a rank's shard."""
        used = self.slots[-1].stop if self.slots else 0
        alignment_bytes = SHARD_ALIGNMENT_BYTES if self.world_size > 1 else SLOT_ALIGNMENT_BYTES
        alignment = max(self.block_numel, alignment_bytes // self.dtype.itemsize)
        return round_up(-(-used // self.world_size), alignment)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of a rank's shard."""
        return self.shard_numel * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * self.dtype.itemsize

    def elements(self, memory: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`memory` for the whole buffer, uint8 1D, as its elements, `[numel]`, of `dtype` or the compute dtype."""
        dtype = dtype or self.dtype
        return memory[: self.numel * dtype.itemsize].view(dtype)

    def gaps(self) -> list[tuple[int, int]]:
        """The padding: element ranges that belong to no parameter."""
        edges = [(slot.start, slot.stop) for slot in self.slots] + [(self.numel, self.numel)]
        gaps, end = [], 0
        for start, stop in edges:
            if start > end:
                gaps.append((end, start))
            end = stop
        return gaps


def slot_alignment_numel(dtype: torch.dtype) -> int:
    """Elements between possible starts of a parameter."""
    return max(1, SLOT_ALIGNMENT_BYTES // dtype.itemsize)


def lay_out(
    name: str,
    params: Sequence[ParamSpec],
    *,
    dtype: torch.dtype,
    trainable: bool,
    world_size: int = 1,
    block_numel: int = 1,
    counts: bool = True,
) -> FlatLayout:
    """Place parameters one after the other; `block_numel` is a power of two."""
    alignment = max(block_numel, slot_alignment_numel(dtype))
    slots, position = [], 0
    for param in params:
        slots.append(Slot(param, position))
        position = round_up(position + param.numel, alignment)
    return FlatLayout(name, dtype, trainable, tuple(slots), world_size, block_numel, counts)
