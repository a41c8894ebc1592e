"""The engine in plain Python, for where the native module was not built: aiofiles on an event loop's thread."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import aiofiles
import torch

from zerooffload.aio.api import OpenFile
from zerooffload.errors import InternalError, TierIOError


class AiofilesTicket:
    """One operation on the loop; owns its buffer through the coroutine."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block; raise `TierIOError` for anything but a whole transfer."""
        self._future.result()

    def done(self) -> bool:
        """Ask without blocking."""
        return self._future.done()


class AiofilesEngine:
    """aiofiles over the file's own descriptor, so that O_DIRECT stays in force."""

    name = "aiofiles"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zerooffload-aiofiles", daemon=True)
        self._thread.start()
        self._in_flight: set[Future[None]] = set()

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> AiofilesTicket:
        """See `Engine`."""
        return self._submit(_transfer("read", file, offset_bytes, target))

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> AiofilesTicket:
        """See `Engine`."""
        return self._submit(_transfer("write", file, offset_bytes, source))

    def submit_flush(self, file: OpenFile) -> AiofilesTicket:
        """See `Engine`."""
        return self._submit(_flush(file))

    def close(self) -> None:
        """See `Engine`."""
        if self._loop.is_closed():
            return
        for future in tuple(self._in_flight):
            future.exception()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, None]) -> AiofilesTicket:
        if self._loop.is_closed():
            work.close()
            raise InternalError("the aiofiles engine is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._in_flight.add(future)
        future.add_done_callback(self._in_flight.discard)
        return AiofilesTicket(future)


async def _transfer(operation: str, file: OpenFile, offset_bytes: int, buffer: torch.Tensor) -> None:
    # A numpy array exposes the tensor's own memory, so nothing is copied on the way.
    view = memoryview(buffer.numpy().data)
    moved = 0
    try:
        # An own open file description: concurrent transfers must not share a position. /proc/self/fd would do, but a
        # descriptor opened by path inherits nothing, O_DIRECT included, so it is asked for again.
        async with aiofiles.open(file.path, "r+b", buffering=0, opener=file.reopen) as stream:
            await stream.seek(offset_bytes)
            while moved < len(view):
                if operation == "read":
                    count = await stream.readinto(view[moved:])
                else:
                    count = await stream.write(view[moved:])
                if not count:
                    raise OSError(errno.EIO, "end of file")  # noqa: TRY301 - becomes a TierIOError like the others
                moved += count
    except OSError as error:
        raise TierIOError(
            operation,
            file.path,
            error.errno or errno.EIO,
            offset_bytes=offset_bytes,
            length_bytes=len(view),
            transferred_bytes=moved,
        ) from None


async def _flush(file: OpenFile) -> None:
    # Of the whole file, whichever descriptor its bytes came through.
    flush = getattr(os, "fdatasync", os.fsync)
    try:
        await asyncio.to_thread(flush, file.fd)
    except OSError as error:
        raise TierIOError("flush", file.path, error.errno or errno.EIO) from None
