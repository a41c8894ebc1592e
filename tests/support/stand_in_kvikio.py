"""A module like kvikio, as far as we use it: `CuFile(path, "r").pread(buffer, size, file_offset)`, and its futures.

It reads files as they are, on a thread, into memory that is the host's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch


class _IOFuture:
    def __init__(self, future: Future[int]) -> None:
        self._future: Future[int] | None = future

    def get(self) -> int:
        """Once: as a future of C++ it has nothing left then."""
        future, self._future = self._future, None
        if future is None:
            raise RuntimeError("no associated state")
        return future.result()

    def done(self) -> bool:
        """Whether it would not block."""
        return self._future is None or self._future.done()


class StandIn(ModuleType):
    """The module.

    Attributes
    ----------
    most_bytes : int
        Of one read; more is cut short.
    error : str
        If there is one, reads fail with it.
    refuses : str
        If there is one, `CuFile` does.
    change : callable
        Applied to what is read.
    goes_on : threading.Event
        Reads wait for it.
    open_files : list[Path]
    """

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.most_bytes = 1 << 40
        self.error = self.refuses = ""
        self.change: Callable[[torch.Tensor], object] = lambda _: None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.open_files: list[Path] = []
        self.num_reads = 0
        self._pool = ThreadPoolExecutor(2)

    def CuFile(self, path: Path, flags: str) -> _CuFile:  # noqa: N802 - kvikio's name
        """Open a file."""
        if self.refuses:
            raise RuntimeError(self.refuses)
        assert flags == "r"
        return _CuFile(self, path)

    def read(self, descriptor: int, buffer: torch.Tensor, offset: int) -> _IOFuture:
        """Begin to."""
        self.num_reads += 1

        def happen() -> int:
            assert self.goes_on.wait(30)
            if self.error:
                raise RuntimeError(self.error)
            part = buffer[: self.most_bytes]
            count = os.preadv(descriptor, [part.numpy().data], offset)
            self.change(part)
            return count

        return _IOFuture(self._pool.submit(happen))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _CuFile:
    def __init__(self, module: StandIn, path: Path) -> None:
        self._module = module
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        module.open_files.append(path)

    def pread(self, buf: torch.Tensor, size: int, file_offset: int) -> _IOFuture:
        assert buf.numel() == size
        return self._module.read(self._descriptor, buf, file_offset)

    def close(self) -> None:
        os.close(self._descriptor)
        self._module.open_files.remove(self._path)
