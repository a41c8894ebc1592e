"""Files and folders whose names survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path

from zerooffload.errors import TierIOError


def write_durably(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all.

    Raises
    ------
    TierIOError
        If that fails; what was there before still is.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(fd)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TierIOError("write", path, error.errno or 0) from error
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Make the names in a folder durable.

    Raises
    ------
    TierIOError
        If that fails.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise TierIOError("flush", directory, error.errno or 0) from error
