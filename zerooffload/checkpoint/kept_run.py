"""What a rank's directories on the nvme paths hold, as a checkpoint has it. Pure.

[Note: a step that is kept as a checkpoint]
Both formats have the same bytes of a state in the same order; they differ in what lies between them. On the nvme tier a
chunk's record has all states of its elements, padded; in a checkpoint a state's elements follow each other in a file
of their own. So the bytes of a state of a chunk are a few runs of its record, and a chunk stays a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch

from zerooffload.checkpoint.manifest import ChunkEntry, GroupEntry, Manifest, ParamEntry, RunEntry, StateEntry, checked
from zerooffload.config import Algorithm, MomentFormat
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.journal import FlatEntry, StepRecord
from zerooffload.journal import Manifest as KeptManifest
from zerooffload.journal import StateEntry as KeptState
from zerooffload.journal.verification import layout_of
from zerooffload.tiers import RecordLayout

_KINDS = ("parameters", "optimizer state")
_NO_CHECKSUM = "0" * 16


@dataclass(frozen=True)
class KeptRecord:
    """A chunk's record of one or more states.

    Attributes
    ----------
    path : int
        Of the rank's paths, on whose file it lies.
    offset_bytes : int
    checksum : int
        Of the record, padding included.
    layout : RecordLayout
    number : int
        Of the chunk in the layout.
    """

    path: int
    offset_bytes: int
    checksum: int
    layout: RecordLayout
    number: int

    @property
    def nbytes(self) -> int:
        """Padding included."""
        return self.layout.file_nbytes(self.number)

    def cut(self, memory: torch.Tensor, places: tuple[slice, ...]) -> dict[str, list[torch.Tensor]]:
        """Of the record, uint8 1D, the items of the elements at `places`, by state."""
        views = self.layout.split(self.number, memory)
        cuts = [self.layout.cut(views, place.start, place.stop) for place in places]
        return {name: [cut[name] for cut in cuts] for name in views}


@dataclass(frozen=True)
class KeptChunk:
    """The same elements of every state; `places` are those of parameters, counted from the chunk's start."""

    records: tuple[KeptRecord, ...]
    places: tuple[slice, ...]


@dataclass(frozen=True)
class KeptPart:
    """A rank's part of a checkpoint: its manifest, without checksums, and the chunks that it names."""

    manifest: Manifest
    chunks: tuple[KeptChunk, ...]


def parts_of(save: str, kept: list[tuple[KeptManifest, StepRecord]]) -> list[KeptPart]:
    """The parts of all ranks, in their order; what several ranks keep is in that of the first.

    Parameters
    ----------
    save : str
        Names the checkpoint.
    kept : list of (Manifest, StepRecord)
        Of each rank, of the same step.

    Raises
    ------
    ConfigError
        If the run does not keep all that a checkpoint holds.
    CheckpointError
        If a manifest and a record contradict each other.
    """
    taken: set[tuple[str, int]] = set()
    try:
        return [_part(save, manifest, record, len(kept), taken) for manifest, record in kept]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of the run contradicts its records: {error!r:.500}") from error


def _part(
    save: str, manifest: KeptManifest, record: StepRecord, num_ranks: int, taken: set[tuple[str, int]]
) -> KeptPart:
    states = {state.name: state for state in manifest.states}
    firsts = dict(zip(states, accumulate((len(state.chunks) for state in manifest.states), initial=0), strict=False))
    trainable = [flat.name for flat in manifest.flats if flat.trainable]
    steps = dict(zip(trainable, record.state["steps"], strict=True))
    groups: list[GroupEntry] = []
    params: list[ParamEntry] = []
    chunks: list[tuple[int, KeptChunk]] = []
    for flat in manifest.flats:
        num_steps = steps.get(flat.name, [0] * len(flat.params))
        if (flat.name, flat.shard_start) in taken:
            continue
        taken.add((flat.name, flat.shard_start))
        names = [f"{flat.name} {kind}" for kind in (_KINDS if flat.trainable else _KINDS[:1])]
        if any(name not in states for name in names):
            raise ConfigError(
                f"the run keeps no copy of {flat.params[0].name}, which a checkpoint needs: what is frozen and lives in"
                " memory comes from the model. Resume the run, and call zo.save"
            )
        of_flat = [states[name] for name in names]
        group = _group(flat, of_flat)
        if group not in groups:
            groups.append(group)
        params += _params(flat, of_flat[0], groups.index(group), num_steps)
        chunks += _chunks(flat, [(state, firsts[state.name]) for state in of_flat], record)
    names_of = [[part.name for state in chunk.records for part in state.layout.parts] for _, chunk in chunks]
    made = checked(
        Manifest(
            save=save,
            rank=manifest.rank,
            num_ranks=num_ranks,
            step=record.step,
            algorithm=cast("Algorithm", manifest.algorithm),
            moments=cast("MomentFormat", manifest.moments),
            groups=tuple(groups),
            params=tuple(params),
            chunks=tuple(
                ChunkEntry(numel, dict.fromkeys(of_chunk, _NO_CHECKSUM))
                for (numel, _), of_chunk in zip(chunks, names_of, strict=True)
            ),
            run=RunEntry(**{name: record.state[name] for name in ("objects", "schedules", "optimizers", "random")}),
            extra=None,
        )
    )
    return KeptPart(made, tuple(chunk for _, chunk in chunks))


def _group(flat: FlatEntry, states: list[KeptState]) -> GroupEntry:
    entries = [StateEntry(part.name, part.dtype, part.block_numel) for state in states for part in state.parts]
    return GroupEntry(flat.dtype, flat.trainable, tuple(entries))


def _params(flat: FlatEntry, state: KeptState, group: int, num_steps: list[int]) -> Iterator[ParamEntry]:
    begin = flat.shard_start
    end = begin + state.num_shards * state.numel
    for param, steps in zip(flat.params, num_steps, strict=True):
        numel = math.prod(param.shape)
        low, high = (min(max(edge - param.start, 0), numel) for edge in (begin, end))
        if low < high or not numel:
            yield ParamEntry(param.name, param.aliases, param.shape, group, low, high, steps)


def _chunks(
    flat: FlatEntry, states: list[tuple[KeptState, int]], record: StepRecord
) -> Iterator[tuple[int, KeptChunk]]:
    """Those that hold elements of parameters, and how many."""
    layouts = [layout_of(state) for state, _ in states]
    if any(layout.num_chunks != len(state.chunks) for layout, (state, _) in zip(layouts, states, strict=True)):
        raise ValueError(f"states of {flat.name} have other chunks than their elements need")
    for number in layouts[0].chunks:
        begin, end = (flat.shard_start + edge for edge in layouts[0].chunk_range(number))
        places: list[slice] = []
        for param in flat.params:
            low, high = max(param.start, begin), min(param.start + math.prod(param.shape), end)
            if low < high and places and places[-1].stop == low - begin:
                places[-1] = slice(places[-1].start, high - begin)
            elif low < high:
                places.append(slice(low - begin, high - begin))
        if places:
            records = tuple(
                _record(state, first + number, layout, number, record)
                for (state, first), layout in zip(states, layouts, strict=True)
            )
            yield sum(place.stop - place.start for place in places), KeptChunk(records, tuple(places))


def _record(state: KeptState, index: int, layout: RecordLayout, number: int, record: StepRecord) -> KeptRecord:
    path, offsets = state.chunks[number]
    named = record.chunks
    return KeptRecord(path, offsets[int(named.slots[index])], int(named.checksums[index]), layout, number)
