"""pread, pwrite and fdatasync on a few native threads."""

from __future__ import annotations

from zerooffload.aio.native_engine import NativeEngine
from zerooffload.formats import GIB
from zerooffload.native import module as _native

DEFAULT_THREADS = 4
WHOLE_BYTES = GIB
"""Pieces so long that no transfer is cut."""


class ThreadsEngine(NativeEngine):
    """An engine of threads. See `Engine`.

    Parameters
    ----------
    num_threads : int
        Pieces that are moved at the same time.
    piece_bytes : int
        Larger transfers are cut into pieces of this length, a multiple of 4096.
    """

    name = "threads"

    def __init__(self, num_threads: int = DEFAULT_THREADS, piece_bytes: int = WHOLE_BYTES) -> None:
        super().__init__(_native.ThreadEngine(num_threads, piece_bytes))
