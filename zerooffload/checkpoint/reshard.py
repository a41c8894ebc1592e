"""Which pieces of which files hold what a rank wants, however many ranks wrote them. Pure.

[Note: parameters are found by name]
A parameter is known by any of its names, so tied weights are found whichever module is asked first, and one that was
tied may be loaded into two that are not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from zerooffload.checkpoint.boxes import Box
from zerooffload.checkpoint.manifest import GroupEntry, Manifest, ParamEntry
from zerooffload.checkpoint.shard_files import ShardFile, plan_files
from zerooffload.errors import CheckpointError

_MOST_PARTS = 1024


@dataclass(frozen=True)
class Source:
    """Elements `[start, stop)` of a parameter: the segment of that number of a chunk's ranges in a rank's files."""

    rank: int
    chunk: int
    segment: int
    start: int
    stop: int


@dataclass(frozen=True)
class SavedPart:
    """A box of a parameter: all of it, but of one that tensor parallelism had cut.

    Attributes
    ----------
    box : Box
    sources : tuple[Source, ...]
        All its elements, in their order, counted in the box.
    """

    box: Box
    sources: tuple[Source, ...]

    def within(self, start: int, stop: int) -> Iterator[Source]:
        """Those that hold elements of `[start, stop)`."""
        first = bisect_right(self.sources, start, key=lambda source: source.stop)
        for source in self.sources[first:]:
            if source.start >= stop:
                return
            yield source


class Run(NamedTuple):
    """Elements that follow each other in a part, `first` of which is the first."""

    part: SavedPart
    first: int
    numel: int

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return self.first + self.numel


@dataclass(frozen=True)
class SavedParam:
    """A parameter as it was saved.

    Attributes
    ----------
    entry : ParamEntry
        Of the first rank that wrote some of it.
    group : GroupEntry
    parts : tuple[SavedPart, ...]
        Each element is in one of them.
    """

    entry: ParamEntry
    group: GroupEntry
    parts: tuple[SavedPart, ...]

    def part_of(self, box: Box) -> SavedPart | None:
        """The part that is this box, if there is one."""
        return next((part for part in self.parts if part.box == box), None)

    def runs(self, box: Box, start: int, stop: int) -> Iterator[Run]:
        """Where elements `[start, stop)` of a box of the parameter are, in their order, however it was cut."""
        part = self.part_of(box)
        if part is not None:
            yield Run(part, start, stop - start)
            return
        for first, _, numel in box.places(start, stop):
            found = (
                (place, Run(part, in_part, count))
                for part in self.parts
                for place, in_part, count in part.box.runs(first, first + numel)
            )
            yield from (run for _, run in sorted(found, key=lambda item: item[0]))


@dataclass(frozen=True)
class Checkpoint:
    """All ranks' manifests and what they mean.

    Attributes
    ----------
    files : tuple[Mapping[str, ShardFile], ...]
        Of each rank, by state.
    params : Mapping[str, SavedParam]
        By each of their names.
    """

    manifests: tuple[Manifest, ...]
    files: tuple[Mapping[str, ShardFile], ...]
    params: Mapping[str, SavedParam]


def join(manifests: Sequence[Manifest], where: str) -> Checkpoint:
    """What the ranks wrote, together; `where` begins messages.

    Raises
    ------
    CheckpointError
        If they contradict themselves or each other, or elements of a parameter are missing or there twice.
    """
    files = tuple(plan_files(manifest, f"{where}, rank {manifest.rank}") for manifest in manifests)
    entries: dict[str, tuple[ParamEntry, GroupEntry]] = {}
    sources: dict[str, dict[Box, list[Source]]] = {}
    for manifest, of_rank in zip(manifests, files, strict=True):
        for entry in manifest.params:
            group = manifest.groups[entry.group]
            first, first_group = entries.setdefault(entry.name, (entry, group))
            is_same = (entry.names, entry.shape, entry.num_steps) == (first.names, first.shape, first.num_steps)
            if not is_same or group != first_group:
                raise CheckpointError(f"{where}: the ranks say different things of {entry.name[:200]}")
            sources.setdefault(entry.name, {}).setdefault(entry.box, [])
        for entry, source in _sources(manifest, of_rank):
            sources[entry.name][entry.box].append(source)
    params = {}
    for name, (entry, group) in entries.items():
        parts = (
            SavedPart(box, tuple(sorted(of_part, key=lambda source: source.start)))
            for box, of_part in sources[name].items()
        )
        param = SavedParam(entry, group, tuple(parts))
        _check_whole(param, where)
        for alias in entry.names:
            if alias in params:
                raise CheckpointError(f"{where}: {alias[:200]} is the name of two parameters")
            params[alias] = param
    return Checkpoint(tuple(manifests), files, params)


def missing_and_unexpected(checkpoint: Checkpoint, wanted: Iterable[Sequence[str]]) -> tuple[list[str], list[str]]:
    """First names of wanted parameters that were not saved, and of saved ones that nobody wants.

    Parameters
    ----------
    wanted : Iterable[Sequence[str]]
        All names of each parameter, the first one first.
    """
    missing, used = [], set()
    for names in wanted:
        found = [checkpoint.params[name].entry.name for name in names if name in checkpoint.params]
        used.update(found)
        if not found:
            missing.append(names[0])
    saved = dict.fromkeys(param.entry.name for param in checkpoint.params.values())
    return missing, [name for name in saved if name not in used]


def _sources(manifest: Manifest, files: Mapping[str, ShardFile]) -> Iterator[tuple[ParamEntry, Source]]:
    """What the chunks hold, as any of a parameter's states tells."""
    done = set()
    for entry in manifest.params:
        state = manifest.groups[entry.group].states[0].name
        if state in done:
            continue
        done.add(state)
        for chunk, of_chunk in files[state].ranges.items():
            for number, segment in enumerate(of_chunk.segments):
                param = manifest.params[segment.param]
                # Of parameters that have two such states, one tells.
                if manifest.groups[param.group].states[0].name == state:
                    yield param, Source(manifest.rank, chunk, number, segment.start, segment.stop)


def _check_whole(param: SavedParam, where: str) -> None:
    what = f"{where}: elements of {param.entry.name[:200]}"
    for part in param.parts:
        end = 0
        for source in part.sources:
            if source.start != end:
                fault = "are there twice" if source.start < end else "are missing"
                raise CheckpointError(f"{what} {fault} (at {source.start})")
            end = source.stop
        if end != part.box.numel:
            raise CheckpointError(f"{what} are missing (from {end} on)")
    boxes = [part.box for part in param.parts]
    if len(boxes) > _MOST_PARTS:
        raise CheckpointError(f"{what} are in {len(boxes)} parts, more than any mesh makes")
    if any(one.overlaps(other) for one, other in combinations(boxes, 2)):
        raise CheckpointError(f"{what} are there twice, in two parts")
    # Parts that do not overlap hold each element if they hold as many.
    if sum(box.numel for box in boxes) != math.prod(param.entry.shape):
        raise CheckpointError(f"{what} are missing, in parts that nobody wrote")
