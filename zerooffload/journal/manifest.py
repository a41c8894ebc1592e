"""What lies where: written once, when a run begins, into every directory of a rank."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from zerooffload.errors import CheckpointError
from zerooffload.journal.sealed import read_sealed, seal

MANIFEST_FILE = "manifest.json"
FORMAT_NAME = "zerooffload-nvme"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PartEntry:
    """An array of a record: `block_numel` elements share one item of `dtype`."""

    name: str
    dtype: str
    block_numel: int


@dataclass(frozen=True)
class StateEntry:
    """A kept state of a flat: how it is cut, and for each chunk the path's index and the offset of each slot.

    `numel` are the elements of a shard.
    """

    name: str
    numel: int
    chunk_numel: int
    num_slots: int
    parts: tuple[PartEntry, ...]
    chunks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_shards: int = 1


@dataclass(frozen=True)
class ParamEntry:
    """A parameter in its flat: first name, other names, shape, first element."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class FlatEntry:
    """A flat buffer; `shard_start` is the first element that this rank updates."""

    name: str
    dtype: str
    trainable: bool
    numel: int
    shard_start: int
    params: tuple[ParamEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything but the bytes.

    Attributes
    ----------
    run : str
        The run's id, a UUID in hexadecimal.
    path, num_paths : int
        Which of the rank's directories this file is in.
    algorithm, moments : str
        Of `OffloadConfig`.
    part : tuple[int, ...]
        Which part of the model the rank has, where others have other parts: the rank over which its parameters are cut,
        the stage of a pipeline.
    """

    run: str
    rank: int
    world_size: int
    path: int
    num_paths: int
    algorithm: str
    moments: str
    flats: tuple[FlatEntry, ...]
    states: tuple[StateEntry, ...]
    part: tuple[int, ...] = ()
    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION

    @property
    def run_id(self) -> bytes:
        """The run's id as 16 bytes."""
        return uuid.UUID(self.run).bytes

    def encode(self) -> bytes:
        """The bytes of the file."""
        return seal(asdict(self))

    def without_places(self) -> Manifest:
        """What must be equal for a run to be continued."""
        states = tuple(replace(state, chunks=()) for state in self.states)
        return replace(self, run="", path=0, states=states)


_ADAPTER = TypeAdapter(Manifest)
_BY_STAGE = ("shard_start", "num_shards")
"""What depends on the stage alone where ranks are the same."""


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises
    ------
    CheckpointError
        If it is not one, of another format, or damaged.
    """
    fields = read_sealed(path, FORMAT_NAME, FORMAT_VERSION)
    try:
        manifest = _ADAPTER.validate_python(fields)
        uuid.UUID(manifest.run)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return manifest


def first_difference(kept: Manifest, now: Manifest) -> str:
    """Where a run that is to be continued differs from the one on the drive, in words; "" if it does not."""
    one, other = kept.without_places(), now.without_places()
    for name in ("world_size", "rank", "part", "num_paths", "algorithm", "moments"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} was {getattr(one, name)}, now it is {getattr(other, name)}"
    for kind in ("flats", "states"):
        before, after = getattr(one, kind), getattr(other, kind)
        for entry, new in zip(before, after, strict=False):
            if entry != new:
                changed = next(key for key in asdict(entry) if getattr(entry, key) != getattr(new, key))
                why = ": the stage was another one" if changed in _BY_STAGE else ""
                return f"{changed} of {entry.name} is not what it was{why}"
        if len(before) != len(after):
            return f"there were {len(before)} {kind}, now there are {len(after)}"
    return ""
