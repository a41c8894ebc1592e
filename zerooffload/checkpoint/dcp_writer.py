"""Writing checkpoints of torch.distributed.checkpoint, box by box.

Its files are zip archives of `torch.save`, one behind the other, and a pickle that tells what lies where; the values in
them are tensors, numbers and names alone.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from zerooffload.checkpoint.boxes import Box, boxes_in
from zerooffload.checkpoint.dcp_reader import METADATA_FILE
from zerooffload.errors import CheckpointError

Key = tuple[str | int, ...]
"""Of a value in the nested dictionary that a user of the checkpoint sees."""

_VERSION = "1.0.0"


def flat_name(key: Key) -> str:
    """As the checkpoint calls it."""
    return ".".join(map(str, key))


@dataclass(frozen=True)
class WrittenBox:
    """Where a box of a tensor lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass
class WrittenTensor:
    """A tensor, and those of its boxes that one rank wrote."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[WrittenBox] = field(default_factory=list)


@dataclass
class Written:
    """What one rank wrote; `values` are (file, start, bytes)."""

    tensors: dict[Key, WrittenTensor] = field(default_factory=dict)
    values: dict[Key, tuple[str, int, int]] = field(default_factory=dict)


class DcpWriter:
    """One rank's file; a context manager.

    Attributes
    ----------
    written : Written

    Raises
    ------
    CheckpointError
        If it cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.written = Written()
        self._name = f"__{rank}_0.distcp"
        self._path = folder / self._name
        try:
            self._file = self._path.open("xb")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._path}: {error.strerror}; a checkpoint must go to a file system that all ranks see"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, key: Key, part: Box, first: int, piece: torch.Tensor) -> None:
        """Write elements of a box of a tensor, from `first` on, counted in the box; `piece` is 1D, in host memory."""
        tensor = self.written.tensors.setdefault(key, WrittenTensor(part.shape, piece.dtype))
        done = 0
        for box in boxes_in(part, first, first + piece.numel()):
            # A copy, because torch.save writes all of a storage.
            start, nbytes = self._save(piece[done : done + box.numel].clone().view(box.sizes))
            tensor.boxes.append(WrittenBox(box.offsets, box.sizes, self._name, start, nbytes))
            done += box.numel
        if not piece.numel():
            start, nbytes = self._save(piece.view(tensor.shape))
            tensor.boxes.append(WrittenBox((0,) * len(tensor.shape), tensor.shape, self._name, start, nbytes))

    def write_value(self, key: Key, value: Any) -> None:
        """Write numbers and texts."""
        self.written.values[key] = (self._name, *self._save(value))

    def finish(self) -> None:
        """Let all of it be on the drive."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from error

    def _save(self, value: Any) -> tuple[int, int]:
        start = self._file.tell()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        try:
            self._file.write(buffer.getbuffer())
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from error
        return start, buffer.tell()


def write_metadata(folder: Path, written: Iterable[Written], aliases: Mapping[Key, Key]) -> None:
    """Write what tells where all ranks' boxes are.

    Parameters
    ----------
    aliases : Mapping[Key, Key]
        Further names of tensors.

    Raises
    ------
    CheckpointError
        If it cannot be written.
    """
    dcp: Any = import_module("torch.distributed.checkpoint.metadata")
    files: Any = import_module("torch.distributed.checkpoint.filesystem")
    tensors: dict[Key, WrittenTensor] = {}
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    names: dict[str, Key] = {}
    for of_rank in written:
        for key, tensor in of_rank.tensors.items():
            tensors.setdefault(key, WrittenTensor(tensor.shape, tensor.dtype)).boxes.extend(tensor.boxes)
        for key, place in of_rank.values.items():
            names[flat_name(key)] = key
            entries[flat_name(key)] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(flat_name(key))] = files._StorageInfo(*place)
    tensors |= {alias: tensors[key] for alias, key in aliases.items()}
    for key, tensor in tensors.items():
        name = flat_name(key)
        names[name] = key
        boxes = sorted(tensor.boxes, key=lambda box: box.offsets)
        chunks = [dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, box in enumerate(boxes):
            index = dcp.MetadataIndex(name, box.offsets, number)
            storage[index] = files._StorageInfo(box.file, box.start, box.nbytes)
    metadata = dcp.Metadata(entries, planner_data=names, storage_data=storage, storage_meta=dcp.StorageMeta())
    if hasattr(metadata, "version"):
        metadata.version = _VERSION
    try:
        with (folder / METADATA_FILE).open("xb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / METADATA_FILE}: {error.strerror}") from error
