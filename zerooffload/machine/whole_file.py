"""Files that others see as they were, or as they are now, and never in part."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file, or replace it, in one go; what is lost in a power cut is not looked after.

    Parameters
    ----------
    mode : int
        Of the file, as far as the process's umask allows it.

    Raises
    ------
    OSError
        If that fails; what was there before still is.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
