"""Which bytes of a rank's files hold what. Pure.

[Note: shard files]
A rank writes one safetensors file for each state, in which its elements of the parameters follow each other in the
order of the manifest: a tensor whole, with its shape, or the elements `[start, stop)` in one dimension. The manifest
cuts the elements into chunks; of each, every state's bytes are one *range* of its file, with a checksum. So a file can
be written and read range by range, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zerooffload.checkpoint.safetensors_file import STORED_DTYPES, Header, header_of
from zerooffload.errors import CheckpointError
from zerooffload.formats import MIB
from zerooffload.tiers import dtype_name

if TYPE_CHECKING:
    from zerooffload.checkpoint.manifest import Manifest, ParamEntry, StateEntry

MOST_RANGE_BYTES = 64 * MIB
"""Of a range, which a reader holds whole: a chunk of 2 Mi elements has a quarter of it at the most."""

# By which transformers tells whose tensors they are.
_METADATA = {"format": "pt"}
_DTYPES = {dtype_name(dtype): dtype for dtype in STORED_DTYPES}


@dataclass(frozen=True)
class Segment:
    """Elements `[start, stop)` of a parameter, and the byte of a range where they begin."""

    param: int
    start: int
    stop: int
    offset_bytes: int


@dataclass(frozen=True)
class Range:
    """A chunk's bytes in a state's file: `offset_bytes` counts from the end of the header."""

    offset_bytes: int
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass
class ShardFile:
    """A rank's file of one state.

    Attributes
    ----------
    ranges : dict[int, Range]
        By the chunk's number, in the order of the file.
    """

    name: str
    header: Header = field(default_factory=lambda: Header({}, {}))
    ranges: dict[int, Range] = field(default_factory=dict)


def file_name(state: str, rank: int, num_ranks: int) -> str:
    """Of a rank's file of a state."""
    return f"{state}-{rank:05d}-of-{num_ranks:05d}.safetensors"


def plan_files(manifest: Manifest, where: str) -> dict[str, ShardFile]:
    """The files of a rank, by state; `where` begins messages.

    Raises
    ------
    CheckpointError
        If the manifest contradicts itself.
    """
    _check_params(manifest, where)
    tensors: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
    for param in manifest.params:
        for state in manifest.groups[param.group].states:
            tensors.setdefault(state.name, []).append((param.name, dtype_of(state, where), _shape(param, state)))
    files = {
        state: ShardFile(file_name(state, manifest.rank, manifest.num_ranks), header_of(of_state, _METADATA))
        for state, of_state in tensors.items()
    }
    ends = dict.fromkeys(files, 0)
    for chunk, pieces in enumerate(_pieces(manifest, where)):
        group = manifest.groups[manifest.params[pieces[0][0]].group]
        if set(manifest.chunks[chunk].checksums) != {state.name for state in group.states}:
            raise CheckpointError(f"{where}: chunk {chunk} has not the checksums of its states")
        for state in group.states:
            made = _range(state, ends[state.name], pieces, where)
            files[state.name].ranges[chunk] = made
            ends[state.name] += made.nbytes
    return files


def dtype_of(state: StateEntry, where: str) -> torch.dtype:
    """A state's dtype; `where` begins messages."""
    if state.dtype not in _DTYPES:
        raise CheckpointError(
            f"{where}: {state.name} has the dtype {state.dtype[:40]}, which safetensors does not have"
        )
    return _DTYPES[state.dtype]


def _check_params(manifest: Manifest, where: str) -> None:
    seen: set[str] = set()
    for group in manifest.groups:
        names = [state.name for state in group.states]
        if len(set(names)) < len(names) or not names:
            raise CheckpointError(f"{where}: a group of parameters has no states, or one twice")
    for param in manifest.params:
        box = param.box
        is_sane = box.is_inside and param.group < len(manifest.groups) and param.start <= param.stop <= box.numel
        if not is_sane or (param.start == param.stop and box.numel) or not seen.isdisjoint(param.names):
            raise CheckpointError(f"{where}: the entry of {param.name[:200]} is impossible, or its name is there twice")
        seen.update(param.names)


def _pieces(manifest: Manifest, where: str) -> Iterator[list[tuple[int, int, int]]]:
    """Of each chunk, the parameters' elements: parameter, start, stop."""
    left = ((index, param.start, param.stop) for index, param in enumerate(manifest.params) if param.stop > param.start)
    index, start, stop = next(left, (-1, 0, 0))
    for number, chunk in enumerate(manifest.chunks):
        pieces, wanted = [], chunk.numel
        while wanted:
            if index < 0:
                raise CheckpointError(f"{where}: chunk {number} has more elements than the parameters")
            taken = min(wanted, stop - start)
            pieces.append((index, start, start + taken))
            start, wanted = start + taken, wanted - taken
            if start == stop:
                index, start, stop = next(left, (-1, 0, 0))
        if len({manifest.params[piece[0]].group for piece in pieces}) > 1:
            raise CheckpointError(f"{where}: chunk {number} holds parameters of several groups")
        yield pieces
    if index >= 0:
        raise CheckpointError(f"{where}: elements of {manifest.params[index].name[:200]} are in no chunk")


def _range(state: StateEntry, offset_bytes: int, pieces: list[tuple[int, int, int]], where: str) -> Range:
    itemsize, segments, nbytes = dtype_of(state, where).itemsize, [], 0
    for param, start, stop in pieces:
        if start % state.block_numel:
            raise CheckpointError(f"{where}: a chunk cuts a block of {state.name}")
        segments.append(Segment(param, start, stop, nbytes))
        nbytes += -(-(stop - start) // state.block_numel) * itemsize
    if nbytes > MOST_RANGE_BYTES:
        raise CheckpointError(f"{where}: a chunk of {nbytes} bytes of {state.name} is longer than any")
    return Range(offset_bytes, nbytes, tuple(segments))


def _shape(param: ParamEntry, state: StateEntry) -> tuple[int, ...]:
    box = param.box
    if state.block_numel == 1 and param.stop - param.start == box.numel:
        return box.sizes
    return (-(-(param.stop - param.start) // state.block_numel),)
