"""How the states of shards lie in chunks. Pure.

[Note: chunks and records]
A shard of `numel` elements is cut into chunks of `chunk_numel`, so that staging never depends on the largest parameter.
Of each chunk, one *record* holds all parts that are read and written together, one after the other: the optimizer's
is `remainder | exp_avg | exp_avg_sq`, a parameter's or gradient's is that alone. Parts start on 64 bytes. On a file a
record is padded to 4096 bytes, which direct I/O needs; a full chunk of one part needs no padding, so the records of a
one-part layout lie back to back and form one flat array.

[Note: chunks have the same number everywhere]
Chunks are numbered over all shards of a flat buffer, whichever of them a block holds: chunk 7 of the parameters, of the
optimizer's record and of the gradient are the same elements, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from zerooffload.formats import round_up

FILE_ALIGNMENT_BYTES = 4096
PART_ALIGNMENT_BYTES = 64

CHUNK_ALIGNMENT_NUMEL = 4096
"""A chunk's elements are a multiple of this: whole file blocks for any dtype, and whole blocks of the gradient norm."""


def dtype_name(dtype: torch.dtype) -> str:
    """As files and messages name it: "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Part:
    """One array of a record.

    Attributes
    ----------
    name : str
    dtype : torch.dtype
    block_numel : int
        Elements of the shard that share one item, a divisor of `CHUNK_ALIGNMENT_NUMEL`.
    """

    name: str
    dtype: torch.dtype
    block_numel: int = 1

    def num_items(self, numel: int) -> int:
        """Items for that many elements."""
        return -(-numel // self.block_numel)


@dataclass(frozen=True)
class RecordLayout:
    """The records of some of a flat buffer's shards; see [Note: chunks have the same number everywhere].

    Attributes
    ----------
    parts : tuple[Part, ...]
    shard_numel : int
        Elements of a shard.
    chunk_numel : int
        Elements of a chunk, a multiple of `CHUNK_ALIGNMENT_NUMEL`; the last chunk of a shard may be shorter.
    shards : range
        Which shards, one after the other.
    """

    parts: tuple[Part, ...]
    shard_numel: int
    chunk_numel: int
    shards: range = range(1)

    @property
    def numel(self) -> int:
        """Elements of the shards."""
        return len(self.shards) * self.shard_numel

    @cached_property
    def chunks(self) -> range:
        """The numbers of the chunks; none for empty shards."""
        return self.chunks_of(self.shards)

    @property
    def num_chunks(self) -> int:
        """How many."""
        return len(self.chunks)

    def chunks_of(self, shards: range) -> range:
        """The numbers of the chunks of these shards."""
        return range(shards.start * self._chunks_per_shard, shards.stop * self._chunks_per_shard)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First element of the chunk in the flat buffer, and the one behind its last."""
        shard, number = divmod(chunk, self._chunks_per_shard)
        start = number * self.chunk_numel
        stop = min(start + self.chunk_numel, self.shard_numel)
        return shard * self.shard_numel + start, shard * self.shard_numel + stop

    @property
    def chunk_numels(self) -> list[int]:
        """Elements of each chunk."""
        full, last = self._chunks_of_shard
        return [*[self.chunk_numel] * full, *last] * len(self.shards)

    def total(self, nbytes_of: Callable[[int], int]) -> int:
        """Over all chunks, of what `nbytes_of` tells of one with so many elements."""
        full, last = self._chunks_of_shard
        of_shard = sum(map(nbytes_of, last), full * nbytes_of(self.chunk_numel) if full else 0)
        return len(self.shards) * of_shard

    def record_nbytes(self, chunk: int) -> int:
        """Bytes of a record in memory."""
        start, stop = self.chunk_range(chunk)
        return self._record_nbytes(stop - start)

    def file_nbytes(self, chunk: int) -> int:
        """Bytes of a record on a file, and in the buffer of its transfer."""
        return round_up(self.record_nbytes(chunk), FILE_ALIGNMENT_BYTES)

    @cached_property
    def largest_file_nbytes(self) -> int:
        """Bytes of the longest record on a file; 0 if there is none."""
        return self.file_nbytes(self.chunks.start) if self.chunks else 0

    @cached_property
    def memory_nbytes(self) -> int:
        """Bytes of all records in memory."""
        return self.total(self._record_nbytes)

    @cached_property
    def total_file_nbytes(self) -> int:
        """Bytes of all records on a file."""
        return self.total(lambda numel: round_up(self._record_nbytes(numel), FILE_ALIGNMENT_BYTES))

    def record_offset(self, chunk: int) -> int:
        """Where a record starts in memory, in bytes: all before it in its shard are full chunks."""
        shard, number = divmod(chunk, self._chunks_per_shard)
        before = (shard - self.shards.start) * (self.memory_nbytes // len(self.shards))
        return before + number * self.record_nbytes(shard * self._chunks_per_shard)

    def split(self, chunk: int, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a record: 1D views `[items of the chunk]` of `record`, a uint8 tensor `[>= record_nbytes]`."""
        start, stop = self.chunk_range(chunk)
        views, offset = {}, 0
        for part in self.parts:
            length = part.num_items(stop - start) * part.dtype.itemsize
            views[part.name] = record[offset : offset + length].view(part.dtype)
            offset += _part_nbytes(part, stop - start)
        return views

    def cut(self, views: Mapping[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
        """Of the parts of a record, what belongs to the elements `[start, stop)`, which begin with a block."""
        return {
            part.name: views[part.name][start // part.block_numel : part.num_items(stop)]
            for part in self.parts
            if part.name in views
        }

    @cached_property
    def _chunks_per_shard(self) -> int:
        return -(-self.shard_numel // self.chunk_numel)

    @property
    def _chunks_of_shard(self) -> tuple[int, list[int]]:
        """How many chunks of a shard are full but for the last, and the elements of that, if there is one."""
        full = max(0, self._chunks_per_shard - 1)
        return full, [self.shard_numel - full * self.chunk_numel] if self._chunks_per_shard else []

    def _record_nbytes(self, numel: int) -> int:
        return sum(_part_nbytes(part, numel) for part in self.parts)


def _part_nbytes(part: Part, numel: int) -> int:
    return round_up(part.num_items(numel) * part.dtype.itemsize, PART_ALIGNMENT_BYTES)
