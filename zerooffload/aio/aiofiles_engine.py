"""The engine in plain Python, for where the native module was not built: aiofiles on an event loop's thread."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import aiofiles
import torch

from zerooffload.aio.api import OpenFile
from zerooffload.aio.tickets import Operation, Ticket, refuse_in_child
from zerooffload.errors import InternalError


class AiofilesTicket(Ticket):
    """One operation on the loop; owns its buffer through the coroutine."""

    def __init__(self, operation: Operation, future: Future[float]) -> None:
        super().__init__(operation)
        self._future = future

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.ended_seconds = self._future.result(seconds)
        except TimeoutError:
            return False
        return True

    def _has_ended(self) -> bool:
        return self._future.done()


class AiofilesEngine:
    """aiofiles over the file's own descriptor, so that O_DIRECT stays in force."""

    name = "aiofiles"
    reads_devices = False

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zerooffload-aiofiles", daemon=True)
        self._thread.start()
        self._in_flight: set[Future[float]] = set()
        self._owner = os.getpid()

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> AiofilesTicket:
        """See `Engine`."""
        operation = Operation("read", file.path, offset_bytes, target.numel())
        return self._submit(operation, _transfer(operation, file, target))

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> AiofilesTicket:
        """See `Engine`."""
        operation = Operation("write", file.path, offset_bytes, source.numel())
        return self._submit(operation, _transfer(operation, file, source))

    def submit_flush(self, file: OpenFile) -> AiofilesTicket:
        """See `Engine`."""
        operation = Operation("flush", file.path)
        return self._submit(operation, _flush(operation, file))

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """See `Engine`; this one cannot."""
        self._check_open()
        return False

    def close(self) -> None:
        """See `Engine`."""
        # The loop's descriptors are shared with the process that this one may have been forked from.
        if self._loop.is_closed() or os.getpid() != self._owner:
            return
        for future in tuple(self._in_flight):
            future.exception()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, operation: Operation, work: Coroutine[Any, Any, float]) -> AiofilesTicket:
        try:
            self._check_open()
        except InternalError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._in_flight.add(future)
        future.add_done_callback(self._in_flight.discard)
        return AiofilesTicket(operation, future)

    def _check_open(self) -> None:
        if self._loop.is_closed():
            raise InternalError("the aiofiles engine is closed")
        refuse_in_child(self._owner)


async def _transfer(operation: Operation, file: OpenFile, buffer: torch.Tensor) -> float:
    """Move all bytes; return when that was done."""
    # A numpy array exposes the tensor's own memory, so nothing is copied on the way.
    view = memoryview(buffer.numpy().data)
    moved = 0
    try:
        # An own open file description: concurrent transfers must not share a position. /proc/self/fd would do, but a
        # descriptor opened by path inherits nothing, O_DIRECT included, so it is asked for again.
        async with aiofiles.open(file.path, "r+b", buffering=0, opener=file.reopen) as stream:
            await stream.seek(operation.offset_bytes)
            while moved < len(view):
                if operation.kind == "read":
                    count = await stream.readinto(view[moved:])
                else:
                    count = await stream.write(view[moved:])
                if not count:
                    raise OSError(errno.EIO, "end of file")  # noqa: TRY301 - becomes a TierIOError like the others
                moved += count
    except OSError as error:
        raise operation.failure(error.errno or errno.EIO, moved) from None
    return time.perf_counter()


async def _flush(operation: Operation, file: OpenFile) -> float:
    """Make the file durable; return when that was done."""
    # Of the whole file, whichever descriptor its bytes came through.
    flush = getattr(os, "fdatasync", os.fsync)
    try:
        await asyncio.to_thread(flush, file.fd)
    except OSError as error:
        raise operation.failure(error.errno or errno.EIO) from None
    return time.perf_counter()
