"""Which pieces of which files hold what a rank wants, however many ranks wrote them. Pure.

[Note: parameters are found by name]
A parameter is known by any of its names, so tied weights are found whichever module is asked first, and one that was
tied may be loaded into two that are not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerooffload.checkpoint.manifest import GroupEntry, Manifest, ParamEntry
from zerooffload.checkpoint.shard_files import ShardFile, plan_files
from zerooffload.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """Elements `[start, stop)` of a parameter: the segment of that number of a chunk's ranges in a rank's files."""

    rank: int
    chunk: int
    segment: int
    start: int
    stop: int


@dataclass(frozen=True)
class SavedParam:
    """A parameter as it was saved.

    Attributes
    ----------
    entry : ParamEntry
        Of the first rank that wrote some of it.
    group : GroupEntry
    sources : tuple[Source, ...]
        All its elements, in their order.
    """

    entry: ParamEntry
    group: GroupEntry
    sources: tuple[Source, ...]

    def within(self, start: int, stop: int) -> Iterator[Source]:
        """Those that hold elements of `[start, stop)`."""
        first = bisect_right(self.sources, start, key=lambda source: source.stop)
        for source in self.sources[first:]:
            if source.start >= stop:
                return
            yield source


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
    sources: dict[str, list[Source]] = {}
    for manifest, of_rank in zip(manifests, files, strict=True):
        for entry in manifest.params:
            group = manifest.groups[entry.group]
            first, first_group = entries.setdefault(entry.name, (entry, group))
            is_same = (entry.names, entry.shape, entry.num_steps) == (first.names, first.shape, first.num_steps)
            if not is_same or group != first_group:
                raise CheckpointError(f"{where}: the ranks say different things of {entry.name[:200]}")
            sources.setdefault(entry.name, [])
        for name, source in _sources(manifest, of_rank):
            sources[name].append(source)
    params = {}
    for name, (entry, group) in entries.items():
        param = SavedParam(entry, group, tuple(sorted(sources[name], key=lambda source: source.start)))
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


def _sources(manifest: Manifest, files: Mapping[str, ShardFile]) -> Iterator[tuple[str, Source]]:
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
                    yield param.name, Source(manifest.rank, chunk, number, segment.start, segment.stop)


def _check_whole(param: SavedParam, where: str) -> None:
    end = 0
    for source in param.sources:
        if source.start != end:
            fault = "are there twice" if source.start < end else "are missing"
            raise CheckpointError(f"{where}: elements of {param.entry.name[:200]} {fault} (at {source.start})")
        end = source.stop
    if end != param.entry.numel:
        raise CheckpointError(f"{where}: elements of {param.entry.name[:200]} are missing (from {end} on)")
