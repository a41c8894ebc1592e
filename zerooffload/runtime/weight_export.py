"""Weights on their way from their homes to the files of a model folder, in pieces, each rank its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerooffload.checkpoint.weights_writer import WeightsWriter
from zerooffload.errors import ConfigError, InternalError
from zerooffload.runtime.logical_states import (
    EXACT_STATES,
    PARAM,
    Piece,
    Views,
    exact_values,
    runs_in_whole,
    state_chunks,
)
from zerooffload.runtime.run import Run
from zerooffload.sharding.unit import Unit

_PIECE_NUMEL = 1 << 16
"""Elements that are converted and written at once."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and the elements of the model that it is made of.

    Attributes
    ----------
    source : torch.Tensor
        A parameter or buffer of the model.
    first : int
        The element of `source`, counted row by row, with which it begins.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: torch.Tensor
    first: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def file_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor of the model becomes in a file: `dtype` converts what is floating-point."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def write_parameters(run: Run, units: Sequence[Unit], tensors: Iterable[FileTensor], writer: WeightsWriter) -> None:
    """Write what this rank stands for: see [Note: what a rank holds of a logical tensor].

    Where a tensor gets another dtype than its parameter has, it is rounded from the fp32 master, once, if there is one.

    Raises
    ------
    ConfigError
        If a value is too large for fp16; while parameters are in use.
    CheckpointError, TierIOError
        If something cannot be read or written.
    """
    wanted: dict[int, list[FileTensor]] = {}
    for tensor in tensors:
        wanted.setdefault(id(tensor.source), []).append(tensor)
    params = {
        slot.param.name: param
        for unit in units
        for part in unit.parts
        for slot, param in zip(part.flat.layout.slots, part.flat.params, strict=True)
    }
    needs_master = any(tensor.dtype != tensor.source.dtype for of_one in wanted.values() for tensor in of_one)
    states = EXACT_STATES if needs_master else {PARAM}

    def made_of(piece: Piece) -> Sequence[FileTensor]:
        return wanted.get(id(params[piece.param.name]), ())

    chunks = [
        chunk
        for chunk in state_chunks(units)
        if chunk.part.flat.layout.counts and any(made_of(piece) for piece in chunk.pieces)
    ]
    run.check_idle("zo.export_safetensors")
    with torch.no_grad(), run.logical_states(chunks, states, alone=True) as homes:
        for reading in homes.read(chunks):
            chunk, views = reading.chunk, reading.views()
            for piece in chunk.pieces:
                for first, there in runs_in_whole(piece):
                    for tensor in made_of(piece):
                        low = max(first, tensor.first)
                        high = min(first + there.stop - there.start, tensor.first + tensor.numel)
                        for start in range(low, high, _PIECE_NUMEL):
                            stop = min(start + _PIECE_NUMEL, high)
                            place = slice(there.start + start - first, there.start + stop - first)
                            writer.write(tensor.name, start - tensor.first, _values(views, place, tensor))


def write_buffers(tensors: Iterable[FileTensor], writer: WeightsWriter) -> None:
    """Write tensors whose sources hold their values."""
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.source.detach().reshape(-1)[tensor.first : tensor.first + tensor.numel]
            for start in range(0, tensor.numel, _PIECE_NUMEL):
                piece = flat[start : start + _PIECE_NUMEL].cpu()
                writer.write(tensor.name, start, _rounded(piece, tensor))


def _values(views: Views, place: slice, tensor: FileTensor) -> torch.Tensor:
    items = {name: views[name][place] for name in EXACT_STATES & views.keys()}
    if tensor.dtype == items[PARAM].dtype:
        return items[PARAM]
    return _rounded(exact_values(items), tensor)


def _rounded(values: torch.Tensor, tensor: FileTensor) -> torch.Tensor:
    rounded = values.to(tensor.dtype)
    if tensor.dtype is torch.float16 and bool((rounded.isinf() & values.isfinite()).any()):
        raise ConfigError(
            f"{tensor.name} has values beyond those of fp16, 65504 at the most: export it as bf16 or fp32"
        )
    return rounded


def check_sources(tensors: Iterable[FileTensor], sources: Mapping[str, torch.Tensor]) -> None:
    """See that the tensors together hold every element of every source.

    Raises
    ------
    InternalError
        If one is left out.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        spans.setdefault(id(tensor.source), []).append((tensor.first, tensor.first + tensor.numel))
    for name, source in sources.items():
        if _end(iter(sorted(spans.get(id(source), [])))) < source.numel():
            raise InternalError(f"an export would leave out elements of {name}")


def _end(spans: Iterator[tuple[int, int]]) -> int:
    """The first element that the spans, in rising order, leave out."""
    end = 0
    for start, stop in spans:
        if start > end:
            break
        end = max(end, stop)
    return end
