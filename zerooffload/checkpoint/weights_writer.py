"""Writing tensors piece by piece at their places in safetensors files, by one process or several, and proving it.

Where every byte will lie is settled before the first one is written, so that those who hold pieces of a tensor need not
know of each other.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import xxhash

from zerooffload.checkpoint.safetensors_file import MOST_HEADER_BYTES, Header, TensorEntry, header_of
from zerooffload.errors import CheckpointError, ConfigError, InternalError
from zerooffload.formats import format_bytes

Spans = dict[str, list[tuple[int, int]]]
"""Of each tensor, ranges of elements counted row by row."""

_METADATA = {"format": "pt"}
"""Without it, the Hugging Face libraries refuse a file."""
_READ_NBYTES = 1 << 20


@dataclass(frozen=True)
class PlannedFile:
    """A file that is to be written."""

    name: str
    header: Header

    @cached_property
    def prefix(self) -> bytes:
        """The bytes before the data."""
        return self.header.encode()

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self.prefix) + self.header.data_nbytes

    def offset(self, name: str, first: int) -> int:
        """Where element `first` of a tensor lies."""
        entry = self.header.entries[name]
        return len(self.prefix) + entry.start + first * entry.dtype.itemsize


def plan_files(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    most_nbytes: int,
    *,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[PlannedFile]:
    """The files for tensors, `(name, dtype, shape)`, in their order.

    Parameters
    ----------
    most_nbytes : int
        Of tensors in a file; a larger tensor has one of its own.
    stem : str
        Files are called `stem.safetensors`, or, if there are several, `stem-00001-of-00002.safetensors`.

    Raises
    ------
    ConfigError
        If a file would have a header that no reader takes.
    """
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    total = 0
    for name, dtype, shape in tensors:
        nbytes = TensorEntry(name, dtype, shape, 0).nbytes
        if groups[-1] and total + nbytes > most_nbytes:
            groups.append([])
            total = 0
        groups[-1].append((name, dtype, shape))
        total += nbytes
    texts = {**_METADATA, **(metadata or {})}
    count = len(groups)
    files = [
        PlannedFile(
            f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors",
            header_of(group, texts),
        )
        for number, group in enumerate(groups, 1)
    ]
    if any(len(file.prefix) > MOST_HEADER_BYTES for file in files):
        raise ConfigError("a file would hold more tensors than its header can name: lower max_shard_size")
    return files


def index_of(files: Sequence[PlannedFile]) -> dict[str, Any]:
    """What `*.safetensors.index.json` says of several files."""
    return {
        "metadata": {
            "total_parameters": sum(entry.numel for file in files for entry in file.header.entries.values()),
            "total_size": sum(file.header.data_nbytes for file in files),
        },
        "weight_map": {name: file.name for file in files for name in file.header.entries},
    }


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a small file, durably.

    Raises
    ------
    CheckpointError
        If it cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(fields, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _failure("write", path, error) from error


def create_files(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Make the files with their headers, and take the space of all tensors.

    Raises
    ------
    CheckpointError
        If the space is not there.
    """
    for planned in files:
        path = folder / planned.name
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.posix_fallocate(fd, 0, planned.nbytes)
                _write_all(fd, memoryview(planned.prefix), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise _failure("write", path, error, sum(file.nbytes for file in files)) from error


class WeightsWriter:
    """Writes pieces into files that `create_files` made; a context manager.

    Parameters
    ----------
    folder : pathlib.Path
    files : Sequence[PlannedFile]

    Raises
    ------
    CheckpointError
        If a file is not there: all who write must see the same folder.
    """

    def __init__(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        self._folder = folder
        self._places = {name: file for file in files for name in file.header.entries}
        self._fds: dict[str, int] = {}
        self._spans: Spans = {}
        self._sent: list[_Sent] = []
        try:
            for file in files:
                self._fds[file.name] = os.open(folder / file.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"cannot open {folder / file.name}: {error.strerror}; weights must go to a file system that"
                " all ranks see"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; again is harmless."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    @property
    def spans(self) -> Spans:
        """What was written."""
        return self._spans

    def write(self, name: str, first: int, piece: torch.Tensor) -> None:
        """Write elements of a tensor, from `first` on, counted row by row.

        Parameters
        ----------
        piece : torch.Tensor
            1D, contiguous, of the tensor's dtype, in host memory.

        Raises
        ------
        CheckpointError
            If it cannot be written.
        """
        if not piece.numel():
            return
        file = self._places[name]
        path, offset = self._folder / file.name, file.offset(name, first)
        view = memoryview(piece.view(torch.uint8).numpy().data)
        try:
            _write_all(self._fds[file.name], view, offset)
        except OSError as error:
            raise _failure("write", path, error) from error
        self._sent.append(_Sent(name, file.name, offset, len(view), xxhash.xxh3_64_intdigest(view)))
        spans = self._spans.setdefault(name, [])
        start = spans.pop()[0] if spans and spans[-1][1] == first else first
        spans.append((start, first + piece.numel()))

    def verify(self) -> None:
        """Flush what was written, read it back from the drive, and compare.

        Raises
        ------
        CheckpointError
            If something else is there.
        """
        for name, fd in self._fds.items():
            try:
                os.fsync(fd)
                # What is read next comes from the drive, and not from memory.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise _failure("flush", self._folder / name, error) from error
        for sent in self._sent:
            if self._checksum_on_drive(sent) != sent.checksum:
                raise CheckpointError(
                    f"{self._folder / sent.file} holds other bytes than were written for {sent.name} ({sent.nbytes} at"
                    f" offset {sent.offset}): the drive, or memory, does not keep what it is given"
                )

    def _checksum_on_drive(self, sent: _Sent) -> int:
        digest, done = xxhash.xxh3_64(), 0
        while done < sent.nbytes:
            try:
                read = os.pread(self._fds[sent.file], min(_READ_NBYTES, sent.nbytes - done), sent.offset + done)
            except OSError as error:
                raise _failure("read", self._folder / sent.file, error) from error
            if not read:
                break
            digest.update(read)
            done += len(read)
        return digest.intdigest()


def check_complete(files: Sequence[PlannedFile], written: Iterable[Spans]) -> None:
    """See that every element of every tensor was written, and once.

    Parameters
    ----------
    written : Iterable[Spans]
        Of everyone who wrote.

    Raises
    ------
    InternalError
        If not.
    """
    spans: Spans = {}
    for of_one in written:
        for name, ranges in of_one.items():
            spans.setdefault(name, []).extend(ranges)
    for file in files:
        for entry in file.header.entries.values():
            end = 0
            for start, stop in sorted(spans.get(entry.name, [])):
                if start != end:
                    break
                end = stop
            if end != entry.numel:
                raise InternalError(
                    f"elements of {entry.name} from {end} on were not written once: {entry.numel} in all"
                )


@dataclass(frozen=True)
class _Sent:
    """A piece that was written."""

    name: str
    file: str
    offset: int
    nbytes: int
    checksum: int


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _failure(operation: str, path: Path, error: OSError, needed_nbytes: int = 0) -> CheckpointError:
    advice = (
        f": {format_bytes(needed_nbytes)} are needed there" if needed_nbytes and error.errno == errno.ENOSPC else ""
    )
    return CheckpointError(f"cannot {operation} {path}: {error.strerror}{advice}")
