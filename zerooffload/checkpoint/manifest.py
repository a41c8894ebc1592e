"""What a rank wrote into a checkpoint; the format is specified in `zerooffload/docs/checkpoint_format.md`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from zerooffload.checkpoint.boxes import Box
from zerooffload.config import Algorithm, MomentFormat
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.formats import format_bytes
from zerooffload.journal.sealed import MOST_BYTES, read_sealed, seal

FORMAT_NAME = "zerooffload-checkpoint"
FORMAT_VERSION = 1

# A bool is an int, and a text may look like one.
Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Name = Annotated[str, Field(max_length=4096)]
StateName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


_Lengths = Annotated[tuple[Count, ...], Field(max_length=64)]


class _Strict:
    """Nothing is read over."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class StateEntry(_Strict):
    """A state: `block_numel` elements of a parameter share one item of `dtype`."""

    name: StateName
    dtype: Name
    block_numel: Annotated[int, Field(ge=1, le=4096, strict=True)]


@dataclass(frozen=True)
class GroupEntry(_Strict):
    """What parameters of one kind have: their compute dtype, whether they are trained, and their states."""

    dtype: Name
    trainable: bool
    states: tuple[StateEntry, ...]


@dataclass(frozen=True)
class BoxEntry(_Strict):
    """A box of a parameter: its first index and its length in each dimension."""

    offsets: _Lengths
    sizes: _Lengths


@dataclass(frozen=True)
class ParamEntry(_Strict):
    """A parameter, and which elements of it this rank wrote, counted row by row: `[start, stop)`.

    `group` is its place in `Manifest.groups`; `num_steps` says how often it was updated. Of one that tensor parallelism
    has cut, the elements are those of a `part`.
    """

    name: Name
    aliases: tuple[Name, ...]
    shape: _Lengths
    group: Count
    start: Count
    stop: Count
    num_steps: Count
    part: BoxEntry | None = None

    @property
    def box(self) -> Box:
        """In which the elements are counted."""
        if self.part is None:
            return Box.of_all(self.shape)
        return Box(self.shape, self.part.offsets, self.part.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class ChunkEntry(_Strict):
    """The next `numel` elements of the parameters, in their order; the checksum of each state's bytes, by its name."""

    numel: Annotated[int, Field(ge=1, lt=1 << 40, strict=True)]
    checksums: dict[StateName, Checksum]


@dataclass(frozen=True)
class RunEntry(_Strict):
    """What of a run is no tensor: JSON values, as `journal.values` makes them.

    Attributes
    ----------
    objects, schedules : dict
        The states of what is tracked, by name.
    optimizers : list
        The settings of each.
    random : dict
        Random states by their source.
    """

    objects: dict[str, Any]
    schedules: dict[str, Any]
    optimizers: list[Any]
    random: dict[str, Any]


@dataclass(frozen=True)
class Manifest(_Strict):
    """Everything of a rank but the states' bytes.

    Attributes
    ----------
    save : str
        The same in all manifests of a checkpoint, and in no other.
    rank, num_ranks : int
        Of the ranks that saved.
    step : int
        Finished calls of `optimizer.step()`.
    algorithm, moments : str
        Of `OffloadConfig`.
    params : tuple[ParamEntry, ...]
        Those of which this rank wrote elements, and those without elements, in the order of the files.
    run : RunEntry
    extra : Any
        A JSON value, as `journal.values` makes it.
    """

    save: Name
    rank: Count
    num_ranks: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    step: Count
    algorithm: Algorithm
    moments: MomentFormat
    groups: tuple[GroupEntry, ...]
    params: tuple[ParamEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    run: RunEntry
    extra: Any
    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """The bytes of the file.

        Raises
        ------
        ConfigError
            If they are more than a reader takes.
        """
        content = seal(asdict(self))
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"what is saved beside the states (extra, tracked objects) takes {format_bytes(len(content))}, more"
                f" than {format_bytes(MOST_BYTES)}: large tensors belong in files of their own"
            )
        return content


_ADAPTER = TypeAdapter(Manifest)


def checked(manifest: Manifest) -> Manifest:
    """It itself, if every value in it is one that a reader takes; `ValueError` otherwise."""
    _ADAPTER.validate_python(asdict(manifest))
    return manifest


def manifest_name(rank: int) -> str:
    """Of a rank's file."""
    return f"rank-{rank:05d}.json"


def read_manifests(folder: Path) -> list[Manifest]:
    """Of all ranks that saved, in their order.

    Raises
    ------
    CheckpointError
        If one is missing, damaged, or of another checkpoint.
    """
    first = _read_manifest(folder / manifest_name(0))
    manifests = [first, *(_read_manifest(folder / manifest_name(rank)) for rank in range(1, first.num_ranks))]
    for rank, manifest in enumerate(manifests):
        if (manifest.save, manifest.rank, manifest.num_ranks) != (first.save, rank, first.num_ranks):
            raise CheckpointError(f"{folder / manifest_name(rank)} belongs to another checkpoint")
    return manifests


def _read_manifest(path: Path) -> Manifest:
    try:
        return _ADAPTER.validate_python(read_sealed(path, FORMAT_NAME, FORMAT_VERSION))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error!s:.1000}") from error
