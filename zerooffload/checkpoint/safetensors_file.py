"""One safetensors file, read slice by slice with plain reads.

A mapped file would count as resident beside the tensors made from it, and tensors that are views of a mapping keep all
of it until the last one is gone.

[Note: safetensors]
8 bytes little-endian header length; a JSON header with `dtype`, `shape` and `data_offsets` (relative to the header's
end) of each tensor, and texts under `__metadata__`; the data, without holes, row by row, little-endian.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from zerooffload.checkpoint.stored_tensor import StoredTensor, is_possible
from zerooffload.errors import CheckpointError
from zerooffload.formats import format_bytes, round_up

MOST_HEADER_BYTES = 100 << 20
"""Of a header, as the format's own library has it."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
STORED_DTYPES = frozenset(_NAMES)
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file; its bytes begin `start` bytes behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a file holds, by name, in the order of its bytes, and the texts beside."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @property
    def data_nbytes(self) -> int:
        """Bytes behind the header."""
        return sum(entry.nbytes for entry in self.entries.values())

    def encode(self, alignment_bytes: int = 8) -> bytes:
        """The bytes before the data, spaces up to a multiple of `alignment_bytes` included."""
        fields: dict[str, Any] = {_METADATA: dict(self.metadata)} if self.metadata else {}
        for entry in self.entries.values():
            fields[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (entry.start, entry.start + entry.nbytes),
            }
        raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        length = round_up(8 + len(raw), alignment_bytes) - 8
        return struct.pack("<Q", length) + raw.ljust(length)


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> Header:
    """A header for tensors, `(name, dtype, shape)`, whose bytes follow each other in that order."""
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name, dtype, shape in tensors:
        entries[name] = TensorEntry(name, dtype, shape, start)
        start += entries[name].nbytes
    return Header(entries, metadata or {})


class SafetensorsFile:
    """A file that is open for reading; a context manager.

    Attributes
    ----------
    path : pathlib.Path
    header : Header

    Raises
    ------
    CheckpointError
        If it cannot be read, is a link or no plain file, or is not a whole safetensors file: whatever its bytes are,
        the memory taken is some multiple of its header's real length.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; again is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read(self, name: str, first: int, target: torch.Tensor) -> None:
        """Read elements `[first, first + target.numel())` of a tensor, counted row by row, into host memory.

        Parameters
        ----------
        target : torch.Tensor
            Contiguous, of the tensor's dtype.

        Raises
        ------
        CheckpointError
            If the file lacks them, or cannot be read.
        """
        entry = self.header.entries[name]
        if target.dtype is not entry.dtype or first < 0 or first + target.numel() > entry.numel:
            raise CheckpointError(
                f"{self.path}: {name} has {entry.numel} elements of {entry.dtype}, asked were {target.numel()} from"
                f" {first} on as {target.dtype}"
            )
        self._read_bytes(self._data_start + entry.start + first * entry.dtype.itemsize, target, f"tensor {name}")

    def read_data(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Read bytes of the data, whatever tensors they belong to, into host memory, uint8 1D.

        Raises
        ------
        CheckpointError
            If the file lacks them, or cannot be read.
        """
        self._read_bytes(self._data_start + offset_bytes, target, f"bytes from {offset_bytes} on")

    def tensor(self, name: str) -> StoredTensor:
        """A tensor that can be read as long as the file is open."""
        return _FileTensor(self, self.header.entries[name])

    def _read_bytes(self, offset: int, target: torch.Tensor, what: str) -> None:
        read_exactly(self._fd, self.path, offset, target, what)

    def _read_header(self) -> Header:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.path} is no plain file")
        prefix = os.pread(self._fd, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else status.st_size
        if length > min(MOST_HEADER_BYTES, status.st_size - 8):
            raise CheckpointError(f"{self.path} is not a whole safetensors file: no header of a sane length")
        raw = torch.empty(length, dtype=torch.uint8)
        self._read_bytes(8, raw, "the header")
        self._data_start = 8 + length
        return parse_header(raw.numpy().tobytes(), status.st_size - self._data_start, self.path)


class _FileTensor:
    """See `StoredTensor`."""

    def __init__(self, file: SafetensorsFile, entry: TensorEntry) -> None:
        self._file = file
        self._name = entry.name
        self.dtype = entry.dtype
        self.shape = entry.shape

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        self._file.read(self._name, first, target)


def read_exactly(fd: int, path: Path, offset: int, target: torch.Tensor, what: str) -> None:
    """Fill a contiguous tensor in host memory with a file's bytes from `offset` on; `path` and `what` are for messages.

    Raises
    ------
    CheckpointError
        If they cannot be read, or the file ends before.
    """
    if not target.numel():
        return
    view = memoryview(target.view(-1).view(torch.uint8).numpy().data)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot read {what} of {path}: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{path} ends within {what}: the file is incomplete")
        done += count


def parse_header(raw: bytes, data_nbytes: int, path: Path) -> Header:
    """The header in `raw`, of a file with `data_nbytes` bytes behind it; `path` is for messages.

    Raises
    ------
    CheckpointError
        If it is none, names a tensor twice, or its tensors do not fill the data without holes and overlaps.
    """
    fields = parse_json(raw, path)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: expected a table of tensors, got {type(fields).__name__}")
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: {_METADATA} must hold texts")
    entries = sorted((_entry(name, entry, path) for name, entry in fields.items()), key=_by_place)
    end = 0
    for entry in entries:
        if entry.start != end:
            fault = "overlaps the one before it" if entry.start < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {entry.name[:200]} {fault} (at byte {entry.start}, expected {end})")
        end += entry.nbytes
    if end > data_nbytes:
        raise CheckpointError(
            f"{path} is incomplete: its tensors have {format_bytes(end)}, the file {format_bytes(data_nbytes)}"
        )
    if end < data_nbytes:
        raise CheckpointError(f"{path} has {data_nbytes - end} bytes that belong to no tensor")
    return Header({entry.name: entry for entry in entries}, metadata)


def parse_json(raw: bytes, path: Path) -> Any:
    """JSON in which no key of a table comes twice; `path` is for messages.

    Raises
    ------
    CheckpointError
        If it is none.
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: {twice[:200]} is there twice")
        return fields

    try:
        return json.loads(raw, object_pairs_hook=table)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error


def _entry(name: str, fields: Any, path: Path) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = _DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {name[:200]} has an entry that cannot be read: {fields!r:.200}"
        ) from error
    # A bool is an int, and a product of large numbers takes time and memory of its own.
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers) or len(shape) > 64:
        raise CheckpointError(f"{path}: tensor {name[:200]} has an impossible shape or place: {fields!r:.200}")
    entry = TensorEntry(name, dtype, tuple(shape), begin)
    if end - begin != entry.nbytes:
        raise CheckpointError(
            f"{path}: tensor {name[:200]} of shape {shape} and {dtype} cannot have {end - begin} bytes, it has"
            f" {entry.nbytes}"
        )
    if not is_possible(entry.shape):
        raise CheckpointError(f"{path}: tensor {name[:200]} has an impossible shape: {shape}")
    return entry


def _by_place(entry: TensorEntry) -> tuple[int, int]:
    return entry.start, entry.nbytes
