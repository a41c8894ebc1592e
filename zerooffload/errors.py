"""The tree of errors that zerooffload raises.

Every error that a user can cause is a `ZeroOffloadError`; its message says what was expected, what was got, whose it is
and what to do. `InternalError` marks a broken invariant of ours: a bug to report.
"""

from __future__ import annotations

import os


class ZeroOffloadError(Exception):
    """Base of all errors of this package."""


class ConfigError(ZeroOffloadError):
    """A setting, a model or a call that cannot work as given."""


class BudgetError(ZeroOffloadError):
    """Bytes that do not fit a tier's budget."""


class CheckpointError(ZeroOffloadError):
    """A checkpoint or model folder that cannot be read or written as asked."""


class RankError(ZeroOffloadError):
    """Another rank failed, or is gone; the message names it."""


class InternalError(ZeroOffloadError):
    """A broken invariant of zerooffload itself."""


class TierIOError(ZeroOffloadError, OSError):
    """An I/O operation of a tier that failed.

    Attributes
    ----------
    errno : int
        The operating system's error number.
    path : str
        The file.
    operation : str
        "read", "write", "open", "reserve" or "flush".
    offset_bytes, length_bytes, transferred_bytes : int
        The request, and how much of it was done before it failed.
    """

    def __init__(
        self,
        operation: str,
        path: str | os.PathLike[str],
        errno: int,
        *,
        offset_bytes: int = 0,
        length_bytes: int = 0,
        transferred_bytes: int = 0,
        advice: str = "",
    ) -> None:
        self.operation = operation
        self.path = os.fspath(path)
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.transferred_bytes = transferred_bytes
        self.advice = advice
        super().__init__(errno, os.strerror(errno), self.path)

    def __str__(self) -> str:
        where = f"{self.operation} of {self.path}"
        if self.length_bytes:
            where += f" at offset {self.offset_bytes}, {self.length_bytes} bytes ({self.transferred_bytes} transferred)"
        text = f"{where} failed: [errno {self.errno}] {self.strerror}"
        return f"{text}. {self.advice}" if self.advice else text
