"""The protocol of an I/O engine.

1. `submit_read` or `submit_write` returns a ticket at once; the buffer is the operation's until the ticket is done.
2. `wait` on the ticket blocks, and raises `TierIOError` if any byte did not move. Every result is checked; a short
   transfer is continued, never taken for success.
3. `submit_flush` returns a ticket at once. Once that is done without an error, all bytes of the file's writes that were
   done *before the flush was submitted* survive a power cut; a write still under way then may or may not. A flush that
   failed leaves it open which of them do, and is not to be repeated: the system tells of a lost write once, so the next
   flush may succeed and mean nothing. Write the bytes again.
4. `register`, for memory that is used again and again, before its first use.
5. `close` finishes what was submitted.

A ticket owns its buffer: holding it keeps the buffer alive. Any thread may submit, and wait for tickets, also for one
that another waits for. Nothing orders two operations but waiting. A wait that lasts long is
warned about, with the file, offset and length.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from zerooffload.telemetry import Waitable


class OpenFile:
    """A file of fixed length, open for direct I/O where the file system allows it.

    Attributes
    ----------
    path : pathlib.Path
    fd : int
    direct : bool
        Whether transfers bypass the page cache (O_DIRECT).
    """

    def __init__(self, path: Path, fd: int, *, direct: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct

    def reopen(self, path: str, flags: int) -> int:
        """An own descriptor of the same file with the same way of I/O (an `opener` for `open`)."""
        return os.open(path, flags | (os.O_DIRECT if self.direct else 0) | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor; again is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Engine(Protocol):
    """Moves bytes between buffers (uint8 tensors, 1D, contiguous) and files.

    Under O_DIRECT, offsets, lengths and addresses are multiples of 4096 bytes: the caller sees to it.

    Attributes
    ----------
    name : str
    reads_devices : bool
        Whether targets of reads may be a device's memory. The host must know that its last use is over, and may let
        the device use it when it has waited for the ticket.
    """

    name: str
    reads_devices: bool

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> Waitable:
        """Read `target.numel()` bytes."""

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> Waitable:
        """Write `source.numel()` bytes."""

    def submit_flush(self, file: OpenFile) -> Waitable:
        """Make durable what was written to the file, up to its length; not its name in its folder."""

    def register(self, memory: torch.Tensor) -> bool:
        """Let the kernel keep the pages of this memory (uint8, 1D), which saves work in each transfer from or to it.

        Advice alone: whether it could is the answer, and unregistered memory works as well. Until `close` the memory
        must not be emptied or remapped (`PageRange.empty`): I/O would go to the old pages and report success.
        """

    def close(self) -> None:
        """Finish what was submitted and stop; again is harmless."""
