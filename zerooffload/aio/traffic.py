"""Keeping a drive busy, to learn how fast it is."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from zerooffload.accelerator.pages import populated_pages
from zerooffload.aio.api import Engine, OpenFile
from zerooffload.formats import MIB
from zerooffload.telemetry import Waitable


@dataclass(frozen=True)
class Mix:
    """Of `reads + writes` transfers, how many read."""

    reads: int
    writes: int


class Traffic:
    """Transfers of whole extents between a scratch file and a few buffers, which are all under way at any time.

    The file has no name, so nothing is left of it, however the process ends. After an error transfers may be under way:
    close the engines first.

    Parameters
    ----------
    folder : pathlib.Path
        On the drive.
    num_buffers : int
        Of host memory, in huge pages.
    extent_bytes : int
        Of a buffer and a transfer, a multiple of 1 MiB.

    Raises
    ------
    OSError
        If no file can be made there, or its file system has no direct I/O.
    """

    def __init__(self, folder: Path, num_buffers: int, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._num_extents = 0
        self._num_done: dict[Mix, int] = {}
        self._file = _scratch_file(folder)
        self._buffers = [_noise(extent_bytes) for _ in range(num_buffers)]

    def register(self, engine: Engine) -> None:
        """Let an engine know the buffers."""
        for buffer in self._buffers:
            engine.register(buffer)

    def fill(self, engine: Engine, num_extents: int, seconds: float) -> int:
        """Write that many extents for the first time, but no more than the seconds allow; how many it became.

        Only those are moved from then on: what was never written costs no drive anything to read. It is at least one
        for each buffer.
        """
        until = time.perf_counter() + seconds
        tickets: list[Waitable] = []
        for extent in range(num_extents):
            if extent >= len(self._buffers):
                tickets.pop(0).wait()
                if time.perf_counter() > until:
                    break
            tickets.append(self._write(engine, extent, self._buffers[extent % len(self._buffers)]))
            self._num_extents = extent + 1
        for ticket in tickets:
            ticket.wait()
        return self._num_extents

    def move(self, engine: Engine, mix: Mix, seconds: float) -> int:
        """Keep all buffers under way for that long, going on where the mix ended before; the bytes that were moved."""
        until = time.perf_counter() + seconds
        tickets: list[Waitable] = []
        num_before = number = self._num_done.get(mix, 0)
        while time.perf_counter() < until:
            if len(tickets) == len(self._buffers):
                tickets.pop(0).wait()
            both = mix.reads + mix.writes
            num_reads = number * mix.reads // both
            is_read = (number + 1) * mix.reads // both > num_reads
            # Writes are half the file ahead: nobody reads what was just written.
            extent = (num_reads if is_read else number - num_reads + self._num_extents // 2) % self._num_extents
            start = self._read if is_read else self._write
            tickets.append(start(engine, extent, self._buffers[number % len(self._buffers)]))
            number += 1
        for ticket in tickets:
            ticket.wait()
        self._num_done[mix] = number
        return (number - num_before) * self._extent_bytes

    def flush(self, engine: Engine) -> None:
        """Make durable what was written."""
        engine.submit_flush(self._file).wait()

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    def _read(self, engine: Engine, extent: int, buffer: torch.Tensor) -> Waitable:
        return engine.submit_read(self._file, extent * self._extent_bytes, buffer)

    def _write(self, engine: Engine, extent: int, buffer: torch.Tensor) -> Waitable:
        return engine.submit_write(self._file, extent * self._extent_bytes, buffer)


class _UnnamedFile(OpenFile):
    """One whose path only tells where it is."""

    def reopen(self, path: str, flags: int) -> int:  # noqa: ARG002 - leads nowhere
        """See `OpenFile`."""
        return super().reopen(f"/proc/self/fd/{self.fd}", flags)


def _scratch_file(folder: Path) -> OpenFile:
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, "this system has no direct I/O")
    fd, name = tempfile.mkstemp(prefix=".zerooffload-probe-", dir=folder)
    try:
        os.close(fd)
        return _UnnamedFile(Path(name), os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), direct=True)
    finally:
        # It lives as long as it is open.
        Path(name).unlink()


def _noise(nbytes: int) -> torch.Tensor:
    """Some file systems and drives make short work of zeros."""
    block = torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    buffer = populated_pages(nbytes)
    buffer.view(-1, MIB).copy_(block)
    return buffer
