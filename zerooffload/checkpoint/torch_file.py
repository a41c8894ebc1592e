"""What `torch.save` wrote, read slice by slice, and without running any code.

[Note: torch files]
A zip file whose entries are not compressed: `data.pkl`, the object, in which tensors are calls that name a storage, and
one entry of little-endian bytes for each storage. The object is a pickle, which can call anything that Python can
import. Here it may only name what is allowed for it; tensors become places in the file. https://docs.python.org/3/library/
pickle.html#restricting-globals
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from zerooffload.checkpoint.safetensors_file import read_exactly
from zerooffload.errors import CheckpointError

Global = tuple[str, str]
"""Module and name, as a pickle names what it calls."""

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGES.values()}
_MOST_PICKLE_BYTES = 1 << 30
_LOCAL_HEADER = struct.Struct("<26xHH")
_BROKEN = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What the readers raise of a file that is not whole, or is none."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a file; its elements lie one after the other, row by row, from byte `offset` on."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def read(self, fd: int, first: int, target: torch.Tensor) -> None:
        """Read elements, counted row by row, into host memory: contiguous, of the tensor's dtype.

        Raises
        ------
        CheckpointError
            If the file lacks them.
        """
        if first < 0 or first + target.numel() > self.numel or target.dtype is not self.dtype:
            raise CheckpointError(f"{self.path}: asked for elements that a tensor of shape {list(self.shape)} lacks")
        read_exactly(fd, self.path, self.offset + first * self.dtype.itemsize, target, "a tensor")


class OpenFiles:
    """Files that are opened when they are first read, and stay open."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}

    def fd(self, path: Path) -> int:
        """Of a file, for reading.

        Raises
        ------
        CheckpointError
            If it cannot be opened, or is a link.
        """
        if path not in self._fds:
            try:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        return self._fds[path]

    def close(self) -> None:
        """Close all; again is harmless."""
        while self._fds:
            _, fd = self._fds.popitem()
            os.close(fd)


class Inert:
    """In place of an object of a class that is not known: holds what it was given, and does nothing."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.args = args
        self.state: Any = fields

    def __setstate__(self, state: Any) -> None:
        self.state = state


def unpickle(raw: bytes, allowed: Mapping[Global, Any], path: Path, *, inert: bool = False) -> Any:
    """The object in a pickle that may name `allowed` and dtypes alone; `path` is for messages.

    Parameters
    ----------
    inert : bool
        Let other classes be `Inert`; else they are refused.

    Raises
    ------
    CheckpointError
        If it names something else, or is none.
    """
    return _load(raw, allowed, path, inert=inert, storage=None)


def read_torch_file(
    path: Path, allowed: Mapping[Global, Any], *, offset: int = 0, nbytes: int | None = None, inert: bool = False
) -> Any:
    """The object in a file of `torch.save`, or in a part of a file; tensors are `PickledTensor`.

    Parameters
    ----------
    allowed, inert
        See `unpickle`.

    Raises
    ------
    CheckpointError
        If it is no such file, is not whole, or names what is not allowed.
    """
    try:
        with open(path, "rb", opener=_not_through_a_link) as file:
            window = _window(file, path, offset, nbytes)
            with zipfile.ZipFile(window) as archive:
                return _read_archive(archive, window, path, allowed, inert=inert)
    except CheckpointError:
        raise
    except _BROKEN as error:
        raise CheckpointError(f"{path} holds no object of torch.save at byte {offset}: {error}") from error


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _window(file: io.BufferedReader, path: Path, offset: int, nbytes: int | None) -> _Window:
    size = os.fstat(file.fileno()).st_size
    end = size if nbytes is None else offset + nbytes
    if not 0 <= offset <= end <= size:
        raise CheckpointError(f"{path} is incomplete: it has {size} bytes, {end} are needed")
    return _Window(file, offset, end - offset)


class _Window(io.RawIOBase):
    """A part of a file as if it were all of it."""

    def __init__(self, file: io.BufferedReader, offset: int, nbytes: int) -> None:
        super().__init__()
        self.fd = file.fileno()
        self.offset = offset
        self.nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self.nbytes - self._position)
        data = os.pread(self.fd, left if size < 0 else min(size, left), self.offset + self._position)
        self._position += len(data)
        return data


def _read_archive(
    archive: zipfile.ZipFile, window: _Window, path: Path, allowed: Mapping[Global, Any], *, inert: bool
) -> Any:
    entries = {info.filename: info for info in archive.infolist()}
    (pickled,) = (info for name, info in entries.items() if name.count("/") == 1 and name.endswith("/data.pkl"))
    root = pickled.filename.removesuffix("data.pkl")
    order = entries.get(root + "byteorder")
    if order is not None and archive.read(order) != b"little":
        raise CheckpointError(f"{path} was written by a machine with another byte order")
    if pickled.compress_type != zipfile.ZIP_STORED or pickled.file_size > min(_MOST_PICKLE_BYTES, window.nbytes):
        raise CheckpointError(f"{path} holds an object that cannot be read")

    def storage(key: str) -> tuple[int, int]:
        info = entries[f"{root}data/{key}"]
        names = _LOCAL_HEADER.unpack(os.pread(window.fd, _LOCAL_HEADER.size, window.offset + info.header_offset))
        start = info.header_offset + _LOCAL_HEADER.size + sum(names)
        if info.compress_type != zipfile.ZIP_STORED or start + info.file_size > window.nbytes:
            raise CheckpointError(f"{path} is incomplete, or compressed")
        return window.offset + start, info.file_size

    return _load(archive.read(pickled), allowed, path, inert=inert, storage=storage)


def _load(
    raw: bytes,
    allowed: Mapping[Global, Any],
    path: Path,
    *,
    inert: bool,
    storage: Callable[[str], tuple[int, int]] | None,
) -> Any:
    try:
        return _Restricted(raw, allowed, path, inert=inert, storage=storage).load()
    except CheckpointError:
        raise
    except _BROKEN as error:
        raise CheckpointError(f"{path} holds an object that cannot be read: {error}") from error


@dataclass(frozen=True)
class _Storage:
    """A storage's bytes in the file."""

    offset: int
    nbytes: int
    dtype: torch.dtype


class _Restricted(pickle.Unpickler):
    """Finds what is allowed, and nothing else: no module is imported, nothing is called that was not given."""

    def __init__(
        self,
        raw: bytes,
        allowed: Mapping[Global, Any],
        path: Path,
        *,
        inert: bool,
        storage: Callable[[str], tuple[int, int]] | None,
    ) -> None:
        super().__init__(io.BytesIO(raw))
        self._path = path
        self._storage = storage
        self._inert = inert
        self._allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            # By which Python 3.11.0 to 3.11.3 name members of enums.
            ("builtins", "getattr"): self._member,
            ("torch", "Size"): torch.Size,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._with_attributes,
            ("torch", "Tensor"): Inert,
            ("torch.nn.parameter", "Parameter"): Inert,
            **{("torch", name): dtype for name, dtype in (_STORAGES | _DTYPES).items()},
            **allowed,
        }

    def find_class(self, module: str, name: str, /) -> Any:
        found = self._allowed.get((module, name))
        if found is None:
            if self._inert:
                return Inert
            raise CheckpointError(f"{self._path} asks for {module}.{name}, which could run code: it is not loaded")
        return found

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or self._storage is None:
            raise CheckpointError(f"{self._path} holds a storage that cannot be read")
        return _Storage(*self._storage(key), dtype)

    def _tensor(self, storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> PickledTensor:
        numbers = [first, *shape, *strides]
        if not isinstance(storage, _Storage) or any(
            type(item) is not int or not 0 <= item < 1 << 63 for item in numbers
        ):
            raise CheckpointError(f"{self._path} holds a tensor that cannot be read")
        found = PickledTensor(self._path, storage.offset + first * storage.dtype.itemsize, storage.dtype, tuple(shape))
        stride = 1
        for length, given in zip(reversed(shape), reversed(strides), strict=True):
            if given != stride and length > 1 and found.numel:
                raise CheckpointError(f"{self._path} holds a tensor that is not stored row by row")
            stride *= length
        if (first + found.numel) * storage.dtype.itemsize > storage.nbytes:
            raise CheckpointError(f"{self._path} is incomplete: a tensor has more elements than are stored")
        return found

    def _member(self, kind: Any, name: Any) -> Any:
        """A member of an enum that is allowed: the one use of `getattr` that runs nothing."""
        is_enum = isinstance(kind, type) and issubclass(kind, Enum)
        if self._inert and kind is Inert:
            return Inert()
        if not is_enum or kind not in self._allowed.values() or name not in kind.__members__:
            raise CheckpointError(f"{self._path} asks for an attribute, which could run code: it is not loaded")
        return kind[name]

    def _with_attributes(self, function: Any, _kind: Any, args: Any, _state: Any) -> Any:
        """A tensor that somebody has hung attributes on, without these."""
        if function not in (self._tensor, _parameter):
            raise CheckpointError(f"{self._path} holds a tensor of a kind that is not known")
        return function(*args)


def _parameter(data: Any, *_: Any) -> Any:
    """A parameter is its values."""
    return data
