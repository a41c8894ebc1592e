"""Reading the weights of a safetensors folder with plain reads, so that they are in memory once.

A mapped file counts as resident beside the tensors made from it, and tensors that are views of the mapping keep all of
it until the last one is gone. Format: 8 bytes little-endian header length, JSON header with `dtype`, `shape` and
`data_offsets` (relative to the header's end), data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch

from zerooffload.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"

_MOST_HEADER_BYTES = 100 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model.

    Raises
    ------
    CheckpointError
        If there are none, or the index names one that is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(_json(index.read_bytes(), index)["weight_map"].values()))
    elif (folder / WEIGHTS_FILE).is_file():
        names = [WEIGHTS_FILE]
    else:
        raise CheckpointError(
            f"{folder} holds no safetensors weights ({WEIGHTS_FILE} or {INDEX_FILE}): other formats can run code when"
            " loaded, so convert them to safetensors first"
        )
    files = [folder / name for name in names]
    for name, file in zip(names, files, strict=True):
        if Path(name).name != name or not file.is_file():
            raise CheckpointError(f"{index} names {name}, which is not a file of that folder")
    return files


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder, each in memory of its own.

    Raises
    ------
    CheckpointError
        If a file is missing, short, or is not safetensors.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as stream:
            fd = stream.fileno()
            header, data_start = _read_header(fd, file)
            for name, entry in header.items():
                weights[name] = _read_tensor(fd, file, name, entry, data_start)
    return weights


def _read_header(fd: int, file: Path) -> tuple[dict[str, Any], int]:
    prefix = os.pread(fd, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MOST_HEADER_BYTES + 1
    if length > _MOST_HEADER_BYTES:
        raise CheckpointError(f"{file} is not a safetensors file: no header of a sane length")
    header = _json(os.pread(fd, length, 8), file)
    header.pop("__metadata__", None)
    return header, 8 + length


def _read_tensor(fd: int, file: Path, name: str, entry: Any, data_start: int) -> torch.Tensor:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name} has an entry that cannot be read ({entry!r})") from error
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise CheckpointError(f"{file}: tensor {name} of shape {shape} and {dtype} cannot have {end - begin} bytes")
    tensor = torch.empty(shape, dtype=dtype)
    if not tensor.numel():
        return tensor
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + (1 << 30)]], data_start + begin + done)
        if not count:
            raise CheckpointError(f"{file} ends within tensor {name}: the file is incomplete")
        done += count
    return tensor


def _json(raw: bytes, file: Path) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON: {error}") from error
