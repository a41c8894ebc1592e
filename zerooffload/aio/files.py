"""Opening and reserving the files that engines work on."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from zerooffload.aio.api import OpenFile
from zerooffload.errors import TierIOError
from zerooffload.formats import format_bytes

_log = logging.getLogger("zerooffload")


def create_file(path: Path) -> OpenFile:
    """Create an empty file (mode 0600).

    Falls back to buffered I/O, with a message, where the file system refuses O_DIRECT.

    Raises
    ------
    TierIOError
        If the file cannot be created.
    """
    return _open(path, os.O_CREAT | os.O_TRUNC)


def open_or_create(path: Path) -> OpenFile:
    """Open a file of ours with what is in it, or create one, like `create_file`.

    Raises
    ------
    TierIOError
        If that cannot be done.
    """
    return _open(path, os.O_CREAT)


def open_file(path: Path) -> OpenFile:
    """Open a file of ours as it is, like `create_file`.

    Raises
    ------
    TierIOError
        If it is not there, or cannot be opened.
    """
    return _open(path, 0)


def reserve_space(file: OpenFile, nbytes: int) -> None:
    """Give the file its length with every block allocated, so that no write of training can find the disk full.

    Raises
    ------
    TierIOError
        If the space is not there.
    """
    if not nbytes:
        return
    try:
        os.posix_fallocate(file.fd, 0, nbytes)
    except OSError as error:
        raise TierIOError(
            "reserve",
            file.path,
            error.errno or errno.EIO,
            length_bytes=nbytes,
            advice=f"The run needs {format_bytes(nbytes)} there: free space, or name another path.",
        ) from error


def _open(path: Path, how: int) -> OpenFile:
    try:
        fd, direct = _open_direct(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | how)
    except OSError as error:
        raise TierIOError("open", path, error.errno or errno.EIO) from error
    return OpenFile(path, fd, direct=direct)


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    o_direct = getattr(os, "O_DIRECT", 0)
    if o_direct:
        try:
            return os.open(path, flags | o_direct, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    _log.warning(
        "%s: the file system refuses O_DIRECT; using buffered I/O, which is slower and fills the page cache",
        path,
    )
    return os.open(path, flags, 0o600), False
