"""Checkpoints of torch.distributed.checkpoint: boxes of tensors in files, and what lies where in a `.metadata` pickle.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PosixPath
from typing import Any, Self

import torch

from zerooffload.checkpoint.boxes import Box
from zerooffload.checkpoint.torch_file import Global, OpenFiles, PickledTensor, read_torch_file, unpickle
from zerooffload.errors import CheckpointError
from zerooffload.formats import format_bytes

METADATA_FILE = ".metadata"

_MOST_METADATA_BYTES = 1 << 30
_CLASSES = {
    "metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "filesystem": ("_StorageInfo",),
}


@dataclass(frozen=True)
class _Item:
    """A part of a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: where its boxes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, _Item], ...]


class DcpReader:
    """A checkpoint, open for reading; a context manager.

    Attributes
    ----------
    path : pathlib.Path
    tensors : Mapping[str, SavedTensor]

    Raises
    ------
    CheckpointError
        If there is none, or what it says contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = OpenFiles()
        self._stored: dict[_Item, PickledTensor] = {}
        metadata = _read_metadata(path / METADATA_FILE)
        try:
            places = {(index.fqn, _numbers(index.offset or ())): info for index, info in metadata.storage_data.items()}
            self.tensors: Mapping[str, SavedTensor] = {
                str(name): _tensor(str(name), entry, places, path)
                for name, entry in metadata.state_dict_metadata.items()
                if hasattr(entry, "chunks")
            }
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path / METADATA_FILE} cannot be used: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._files.close()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements `[start, stop)` of a tensor, counted row by row, in host memory: 1D, of its dtype.

        Raises
        ------
        CheckpointError
            If some are not there.
        """
        saved = self.tensors[name]
        target = torch.empty(stop - start, dtype=saved.dtype)
        is_there = torch.zeros(stop - start, dtype=torch.bool)
        for box, item in saved.boxes:
            for first, in_box, numel in box.runs(start, stop):
                place = slice(first - start, first - start + numel)
                stored = self._stored_at(item, saved, box)
                stored.read(self._files.fd(item.path), in_box, target[place])
                is_there[place] = True
        if not bool(is_there.all()):
            raise CheckpointError(f"{self.path}: elements of {name[:200]} are missing (among those from {start} on)")
        return target

    def _stored_at(self, item: _Item, saved: SavedTensor, box: Box) -> PickledTensor:
        if item not in self._stored:
            stored = read_torch_file(item.path, {}, offset=item.offset, nbytes=item.nbytes)
            if not isinstance(stored, PickledTensor) or (stored.dtype, stored.shape) != (saved.dtype, box.sizes):
                raise CheckpointError(f"{item.path}: at byte {item.offset} is not what was saved of {saved.name[:200]}")
            self._stored[item] = stored
        return self._stored[item]


def prefix_of(saved: Iterable[str], wanted: Iterable[str], where: Path, *, of_states: bool = False) -> str | None:
    """What stands before `wanted` names in a checkpoint: users choose what they call a model, or an optimizer.

    It is the prefix under which the most are found; None if none is.

    Parameters
    ----------
    of_states : bool
        They are states of an optimizer, which stand behind `state.`.

    Raises
    ------
    CheckpointError
        If several fit.
    """
    names, counts = set(wanted), dict[str, int]()
    for name in saved:
        dots = [position + 1 for position, letter in enumerate(name) if letter == "."]
        for prefix in (name[:position] for position in (0, *dots) if name[position:] in names):
            if not of_states or f".{prefix}".endswith(".state."):
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        raise CheckpointError(f"{where} holds several models or optimizers: {', '.join(map(repr, sorted(best)))}")
    return best[0] if best else None


def _read_metadata(path: Path) -> Any:
    try:
        nbytes = path.stat().st_size
        if nbytes > _MOST_METADATA_BYTES:
            raise CheckpointError(f"{path} has {format_bytes(nbytes)}, which no checkpoint needs")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.parent} holds no checkpoint of torch.distributed: {error.strerror}") from error
    return unpickle(raw, _allowed(), path)


def _allowed() -> dict[Global, Any]:
    """What describes a checkpoint, and nothing that does something."""
    serialization: Any = import_module("torch.serialization")
    allowed: dict[Global, Any] = {
        ("pathlib", "PosixPath"): PosixPath,
        ("pathlib._local", "PosixPath"): PosixPath,
        ("torch.serialization", "_get_layout"): serialization._get_layout,
    }
    for name, classes in _CLASSES.items():
        module = f"torch.distributed.checkpoint.{name}"
        allowed |= {(module, each): getattr(import_module(module), each) for each in classes}
    return allowed


def _tensor(name: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any], folder: Path) -> SavedTensor:
    shape, dtype = _numbers(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name[:200]} has no dtype")
    boxes = []
    for chunk in entry.chunks:
        box = Box(shape, _numbers(chunk.offsets), _numbers(chunk.sizes))
        info = places[name, box.offsets]
        if not box.is_inside:
            raise ValueError(f"a part of {name[:200]} is outside of it")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{name[:200]} is stored compressed or encrypted")
        boxes.append((box, _item(info, folder)))
    return SavedTensor(name, dtype, shape, tuple(boxes))


def _item(info: Any, folder: Path) -> _Item:
    name = info.relative_path
    if type(name) is not str or Path(name).name != name or "\0" in name:
        raise ValueError(f"{name!r:.200} is no file of that folder")
    offset, nbytes = _numbers((info.offset, info.length))
    return _Item(folder / name, offset, nbytes)


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(values)
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"impossible numbers {numbers!r:.200}")
    return numbers
