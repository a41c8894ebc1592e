"""One GGUF file, dequantized slice by slice with plain reads.

[Note: GGUF]
Little-endian: the magic, a version, the numbers of tensors and of metadata fields; the fields (name, type, value); of
each tensor its name, lengths (the last dimension's first), type, and where its data begins behind all this, rounded up
to the alignment. A row's data are blocks of a fixed number of elements and of bytes.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from zerooffload.checkpoint.stored_tensor import StoredTensor, is_possible
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.formats import format_bytes, round_up

MOST_METADATA_BYTES = 64 << 20
"""Of all that comes before the data; vocabularies take some MiB."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_MOST_DIMENSIONS = 8
_PIECE_NUMEL = 1 << 16
"""Elements dequantized at once: temporaries take some dozen bytes an element."""


@dataclass(frozen=True)
class _Entry:
    """A tensor; its data begin at byte `start` of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile:
    """A file that is open for reading; a context manager.

    Attributes
    ----------
    path : pathlib.Path
    fields : dict[str, Any]
        The metadata: numbers, bools, texts, and lists of them.
    names : set[str]
        Of the tensors.

    Raises
    ------
    CheckpointError
        If it cannot be read or is not a whole GGUF file: whatever its bytes are, the memory taken is some multiple of
        the metadata's real length.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        try:
            self._nbytes = self._measure()
            self.fields, self._entries = _read_metadata(_Cursor(self, min(self._nbytes, MOST_METADATA_BYTES)))
            self.names = {entry.name for entry in self._entries}
        except BaseException:
            self.close()
            raise

    def _measure(self) -> int:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.path} is no plain file")
        return status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; again is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors as fp32, which can be read as long as the file is open.

        Raises
        ------
        ConfigError
            If the package `gguf` is missing.
        CheckpointError
            If it does not know how one is quantized; if one does not lie in the file, or overlaps another.
        """
        tensors = {entry.name: _DequantizedTensor(self, entry) for entry in self._entries}
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].span):
            start, stop = tensor.span
            if start < end:
                raise CheckpointError(f"{self.path}: tensor {name[:200]} overlaps the one before it")
            end = stop
            if stop > self._nbytes:
                raise CheckpointError(
                    f"{self.path} is incomplete: {name[:200]} ends at {format_bytes(stop)}, the file has"
                    f" {format_bytes(self._nbytes)}"
                )
        return dict(tensors)

    def read_bytes(self, offset: int, nbytes: int, what: str) -> bytearray:
        """Bytes of the file; `what` is for messages.

        Raises
        ------
        CheckpointError
            If they cannot be read.
        """
        data = bytearray(nbytes)
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [memoryview(data)[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {what} of {self.path}: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{self.path} ends within {what}: the file is incomplete")
            done += count
        return data


class _DequantizedTensor:
    """See `StoredTensor`.

    Attributes
    ----------
    span : tuple[int, int]
        Of its bytes in the file.
    """

    def __init__(self, file: GgufFile, entry: _Entry) -> None:
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise ConfigError("reading a GGUF file needs gguf: pip install 'zerooffload[hf]'") from None
        self._file = file
        self._entry = entry
        self._dequantize = quants.dequantize
        self.dtype = torch.float32
        self.shape = entry.shape
        try:
            self._kind = GGMLQuantizationType(entry.kind)
            self._block_numel, self._block_nbytes = GGML_QUANT_SIZES[self._kind]
            # Of one block, to learn whether it can.
            self._dequantize(np.zeros((1, self._block_nbytes), np.uint8), self._kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise CheckpointError(
                f"{file.path}: {entry.name[:200]} is quantized in an unknown way ({entry.kind})"
            ) from error
        if entry.shape and entry.shape[-1] % self._block_numel:
            raise CheckpointError(
                f"{file.path}: rows of {entry.name[:200]}, of shape {entry.shape}, are no whole blocks"
            )
        self.span = (entry.start, entry.start + math.prod(entry.shape) // self._block_numel * self._block_nbytes)

    def read(self, first: int, target: torch.Tensor) -> None:
        """See `StoredTensor`."""
        done = 0
        while done < target.numel():
            block, within = divmod(first + done, self._block_numel)
            numel = min(target.numel() - done, _PIECE_NUMEL)
            num_blocks = -(-(within + numel) // self._block_numel)
            place = self._entry.start + block * self._block_nbytes
            raw = self._file.read_bytes(place, num_blocks * self._block_nbytes, f"tensor {self._entry.name[:200]}")
            with np.errstate(all="ignore"):
                values = self._dequantize(np.frombuffer(raw, np.uint8).reshape(num_blocks, -1), self._kind)
            target[done : done + numel] = torch.from_numpy(values.reshape(-1)[within : within + numel])
            done += numel


class _Cursor:
    """Reads a file from its beginning, up to a limit."""

    _PIECE_BYTES = 1 << 20

    def __init__(self, file: GgufFile, limit: int) -> None:
        self.file = file
        self.position = 0
        self._limit = limit
        self._piece = bytearray()
        self._piece_start = 0

    def take(self, nbytes: int) -> bytearray:
        """The next bytes."""
        self.check_room(nbytes)
        start = self.position - self._piece_start
        if start + nbytes > len(self._piece):
            length = min(max(nbytes, self._PIECE_BYTES), self._limit - self.position)
            self._piece = self.file.read_bytes(self.position, length, "the metadata")
            self._piece_start, start = self.position, 0
        self.position += nbytes
        return self._piece[start : start + nbytes]

    def check_room(self, nbytes: int) -> None:
        """See that so many bytes may follow, before anything is made of them."""
        if nbytes > self._limit - self.position:
            raise CheckpointError(
                f"{self.file.path} is no whole GGUF file: at byte {self.position} of its metadata {nbytes} more were"
                " expected"
            )

    def number(self, code: str) -> Any:
        """A number, as `struct` calls its type."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """A text."""
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: expected a text in the metadata: {error}") from error

    def value(self, kind: int) -> Any:
        """A value of one of GGUF's types."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise CheckpointError(f"{self.file.path}: unknown type {kind} in the metadata")
        inner, length = self.number("I"), self.number("Q")
        if inner == _TEXT:
            # Each has at least its length.
            self.check_room(8 * length)
            return [self.text() for _ in range(length)]
        if inner not in _SCALARS:
            raise CheckpointError(f"{self.file.path}: unknown list of type {inner} in the metadata")
        code = _SCALARS[inner]
        self.check_room(struct.calcsize(code) * length)
        return list(struct.unpack(f"<{length}{code}", self.take(struct.calcsize(code) * length)))


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], list[_Entry]]:
    path = cursor.file.path
    if cursor.take(4) != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path} is of GGUF version {version}, expected one of {_VERSIONS}")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    # A field has a length and a type, a tensor also a place.
    cursor.check_room(12 * num_fields + 24 * num_tensors)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.text()
        if name in fields:
            raise CheckpointError(f"{path}: {name[:200]} is there twice")
        fields[name] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(num_tensors)]
    if len({entry.name for entry in entries}) < len(entries):
        raise CheckpointError(f"{path} names a tensor twice")
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{path}: impossible alignment {alignment!r:.200}")
    start = round_up(cursor.position, alignment)
    return fields, [_Entry(entry.name, entry.shape, entry.kind, start + entry.start) for entry in entries]


def _entry(cursor: _Cursor) -> _Entry:
    name, num_dimensions = cursor.text(), cursor.number("I")
    if num_dimensions > _MOST_DIMENSIONS:
        raise CheckpointError(f"{cursor.file.path}: tensor {name[:200]} has {num_dimensions} dimensions")
    lengths = [cursor.number("Q") for _ in range(num_dimensions)]
    if not is_possible(lengths):
        raise CheckpointError(f"{cursor.file.path}: tensor {name[:200]} has an impossible shape: {lengths}")
    return _Entry(name, tuple(reversed(lengths)), cursor.number("I"), cursor.number("Q"))
