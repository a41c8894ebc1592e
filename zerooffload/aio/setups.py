"""The engines that are worth measuring against each other, with how they cut and queue."""

from __future__ import annotations

from dataclasses import dataclass

from zerooffload.aio.native_engine import NativeEngine
from zerooffload.aio.threads import DEFAULT_THREADS, WHOLE_BYTES, ThreadsEngine
from zerooffload.aio.uring import DEFAULT_ENTRIES, DEFAULT_PIECE_BYTES, UringEngine
from zerooffload.formats import MIB, format_bytes


@dataclass(frozen=True)
class Setup:
    """A native engine and its settings.

    Attributes
    ----------
    engine : str
        "uring" or "threads".
    depth : int
        Pieces at the same time: entries of the ring, or threads.
    piece_bytes : int
        What larger transfers are cut into.
    """

    engine: str
    depth: int
    piece_bytes: int

    def open(self) -> NativeEngine:
        """Such an engine. OSError where io_uring cannot be used."""
        make = UringEngine if self.engine == "uring" else ThreadsEngine
        return make(self.depth, self.piece_bytes)

    def __str__(self) -> str:
        pieces = "whole transfers" if self.piece_bytes >= WHOLE_BYTES else f"pieces of {format_bytes(self.piece_bytes)}"
        return f"{pieces}, {self.depth} at once"


# By preference: the first is taken of those that are equally fast. Linux cuts a whole transfer itself and hands a drive
# all of it before it waits, so on one virtual disk all of these were within 5 % at 16 MiB a transfer; pieces can help
# where several queues share the work. Not worth measuring: threads with pieces of 1 MiB (0.87 to 0.95 there, and twice
# the CPU time), and a ring with pieces of 16 MiB, for which the kernel needs worker threads.
SETUPS = (
    Setup("uring", DEFAULT_ENTRIES, DEFAULT_PIECE_BYTES),
    Setup("uring", DEFAULT_ENTRIES // 2, 4 * MIB),
    Setup("threads", DEFAULT_THREADS, WHOLE_BYTES),
    Setup("threads", DEFAULT_THREADS, 4 * MIB),
)
