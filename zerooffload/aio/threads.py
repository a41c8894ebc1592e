"""The native engine: pread, pwrite and fdatasync on threads of its own."""

from __future__ import annotations

from typing import Any

import torch

from zerooffload.aio.api import OpenFile
from zerooffload.errors import InternalError, TierIOError
from zerooffload.native import module as _native


class ThreadsTicket:
    """One operation of the native engine; owns its buffer."""

    def __init__(self, engine: Any, number: int, file: OpenFile, buffer: torch.Tensor | None) -> None:
        self._engine = engine
        self._number = number
        self._file = file
        self._buffer = buffer
        self._finished = False
        self._failure: TierIOError | None = None

    def wait(self) -> None:
        """Block, without the interpreter lock; raise `TierIOError` for anything but a whole transfer."""
        if self._failure is not None:
            raise self._failure
        if self._finished:
            return
        try:
            # Interrupted by Ctrl-C, the transfer is still under way and the ticket can be waited for again.
            self._engine.wait(self._number)
            self._finished = True
        except _native.IoFailure as failure:
            self._finished = True
            self._failure = TierIOError(
                failure.op,
                self._file.path,
                failure.errno,
                offset_bytes=failure.offset,
                length_bytes=failure.length,
                transferred_bytes=failure.transferred,
            )
            raise self._failure from None

    def done(self) -> bool:
        """Ask without blocking."""
        return self._finished or bool(self._engine.done(self._number))


class ThreadsEngine:
    """pread and pwrite by a few native threads.

    Parameters
    ----------
    num_threads : int
        Operations that run at the same time.
    """

    name = "threads"

    def __init__(self, num_threads: int = 4) -> None:
        if _native is None:
            raise InternalError("the threads engine needs the native module")
        self._engine = _native.ThreadEngine(num_threads)
        self._is_closed = False

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> ThreadsTicket:
        """See `Engine`."""
        self._check_open()
        number = self._engine.submit_read(file.fd, offset_bytes, target.data_ptr(), target.numel())
        return ThreadsTicket(self._engine, number, file, target)

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> ThreadsTicket:
        """See `Engine`."""
        self._check_open()
        number = self._engine.submit_write(file.fd, offset_bytes, source.data_ptr(), source.numel())
        return ThreadsTicket(self._engine, number, file, source)

    def submit_flush(self, file: OpenFile) -> ThreadsTicket:
        """See `Engine`."""
        self._check_open()
        return ThreadsTicket(self._engine, self._engine.submit_flush(file.fd), file, None)

    def close(self) -> None:
        """See `Engine`."""
        self._is_closed = True
        self._engine.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InternalError("the threads engine is closed")
