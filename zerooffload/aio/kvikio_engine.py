"""Reads that go from files straight into the memory of a CUDA device, through kvikio.

With GPUDirect Storage the drive itself writes to the device, and the host's memory is not touched. Where that is not to
be had kvikio copies through buffers of its own: right, but no faster than what it replaces. So it is tried before it is
used: see `device_reads`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from zerooffload.aio.api import Engine, OpenFile
from zerooffload.aio.tickets import Operation, Ticket
from zerooffload.errors import InternalError, TierIOError
from zerooffload.telemetry import Waitable

_PAUSE_SECONDS = 1e-4
"""Between two looks at a future of kvikio, which cannot be waited for with a limit: a hundredth of a chunk's read."""

_ERRORS = (AttributeError, OSError, RuntimeError, TypeError, ValueError)
"""That kvikio raises for what the system, or CUDA, refuses; or a release of it for how it is called."""


class KvikioTicket(Ticket):
    """A read into a device's memory; owns the memory.

    Parameters
    ----------
    opened : callable
        Returns the file as kvikio has it open.
    """

    def __init__(self, operation: Operation, opened: Callable[[], Any], target: torch.Tensor) -> None:
        super().__init__(operation)
        self._opened = opened
        self._target = target
        self._num_moved = 0
        self._future: Any = None
        self._error: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        rest = self._target[self._num_moved :]
        try:
            self._future = self._opened().pread(rest, rest.numel(), self._operation.offset_bytes + self._num_moved)
        except _ERRORS as error:
            self._error = error

    def _ends_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_SECONDS)
        self._take_over()
        if self._num_moved == self._target.numel():
            return True
        # A short read is continued.
        self._begin()
        return self._ends_within(until - time.monotonic())

    def _has_ended(self) -> bool:
        return self._error is not None or self._future.done()

    def _take_over(self) -> None:
        """Count what was read; raise if it is nothing."""
        num_read, reason = 0, "end of file"
        try:
            if self._error is not None:
                raise self._error
            num_read = int(self._future.get())
        except _ERRORS as error:
            # kvikio tells in words, and the system's number only within them.
            reason = str(error)
        self._num_moved += num_read
        if not num_read:
            raise self._operation.failure(errno.EIO, self._num_moved, f"kvikio says: {reason}")


class DeviceReader:
    """Files that kvikio has open, each under a descriptor of its own.

    Parameters
    ----------
    kvikio : module
    """

    def __init__(self, kvikio: ModuleType) -> None:
        self._kvikio = kvikio
        self._files: dict[Path, Any] = {}
        self._under_way: list[KvikioTicket] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> Waitable:
        """Read `target.numel()` bytes into a device's memory, uint8, 1D, whose last use is over."""
        operation = Operation("read", file.path, offset_bytes, target.numel())
        ticket = KvikioTicket(operation, partial(self._opened, file.path), target)
        with self._lock:
            self._under_way = [*(other for other in self._under_way if not other.done()), ticket]
        return ticket

    def close(self) -> None:
        """Finish what was submitted and close the files; again is harmless."""
        if os.getpid() != self._owner:
            return
        under_way, self._under_way = self._under_way, []
        for ticket in under_way:
            # Told to whoever waits for it.
            with suppress(TierIOError):
                ticket.wait()
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _opened(self, path: Path) -> Any:
        with self._lock:
            if path not in self._files:
                self._files[path] = self._kvikio.CuFile(path, "r")
            return self._files[path]


class KvikioEngine:
    """kvikio for reads into a device's memory, and another engine for all that is the host's. See `Engine`."""

    name = "kvikio"
    reads_devices = True

    def __init__(self, host: Engine, reader: DeviceReader) -> None:
        self._host = host
        self._reader = reader
        self._is_closed = False

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> Waitable:
        """See `Engine`."""
        if target.device.type == "cpu":
            return self._host.submit_read(file, offset_bytes, target)
        if self._is_closed:
            raise InternalError("the kvikio engine is closed")
        return self._reader.submit_read(file, offset_bytes, target)

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> Waitable:
        """See `Engine`."""
        return self._host.submit_write(file, offset_bytes, source)

    def submit_flush(self, file: OpenFile) -> Waitable:
        """See `Engine`."""
        return self._host.submit_flush(file)

    def register(self, memory: torch.Tensor) -> bool:
        """See `Engine`."""
        return self._host.register(memory)

    def close(self) -> None:
        """See `Engine`."""
        self._is_closed = True
        self._reader.close()
        self._host.close()
