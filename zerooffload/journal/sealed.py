"""JSON files that say what they are and carry their own checksum: two lines, the JSON and `xxh3-64 <hexadecimal>`."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import xxhash

from zerooffload.errors import CheckpointError
from zerooffload.formats import MIB, format_bytes

MOST_BYTES = 64 * MIB
"""Of such a file."""


def seal(fields: Any) -> bytes:
    """The two lines."""
    line = json.dumps(fields, separators=(",", ":")).encode()
    return line + _second_line(line)


def read_sealed(path: Path, format_name: str, version: int) -> dict[str, Any]:
    """What was sealed; it has a `format` and a `version`.

    Raises
    ------
    CheckpointError
        If the file is a link or no plain file, of another format or version, longer than `MOST_BYTES`, or damaged.
    """
    line, _, rest = _read(path).partition(b"\n")
    if b"\n" + rest != _second_line(line):
        raise CheckpointError(f"{path} is damaged: the checksum is wrong")
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != format_name:
        raise CheckpointError(f"{path} is no manifest of the format {format_name}")
    if fields.get("version") != version:
        raise CheckpointError(
            f"{path} has format version {fields.get('version')!s:.20}, this zerooffload reads {version}:"
            " use the version that wrote it"
        )
    return fields


def _second_line(line: bytes) -> bytes:
    return b"\nxxh3-64 " + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is no plain file")
            if status.st_size > MOST_BYTES:
                raise CheckpointError(
                    f"{path} has {format_bytes(status.st_size)}, which no such file needs (at most"
                    f" {format_bytes(MOST_BYTES)})"
                )
            return stream.read(status.st_size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
