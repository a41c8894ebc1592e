"""Linux's io_uring: transfers are handed to the kernel in batches, and no thread of ours waits for each."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import torch

from zerooffload.aio.native_engine import NativeEngine
from zerooffload.formats import MIB, format_bytes
from zerooffload.machine import lockable_bytes
from zerooffload.native import module as _native

DEFAULT_ENTRIES = 64
DEFAULT_PIECE_BYTES = MIB
_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_log = logging.getLogger("zerooffload")


class UringEngine(NativeEngine):
    """An engine of one io_uring. See `Engine`.

    Parameters
    ----------
    num_entries : int
        Pieces that the kernel has at the same time, at most.
    piece_bytes : int
        Larger transfers are cut into pieces of this length, a multiple of 4096.

    Attributes
    ----------
    why_unregistered : str
        Why memory could not be registered, "" if it could or nobody asked.

    Raises
    ------
    OSError
        If io_uring cannot be used here; `why_unavailable` has words for it.
    """

    name = "uring"

    def __init__(self, num_entries: int = DEFAULT_ENTRIES, piece_bytes: int = DEFAULT_PIECE_BYTES) -> None:
        super().__init__(_native.UringEngine(num_entries, piece_bytes))
        self.why_unregistered = ""
        # While the kernel has its pages, memory of another content must not come to the same addresses.
        self._registered: list[torch.Tensor] = []

    def register(self, memory: torch.Tensor) -> bool:
        """See `Engine`. The memory is kept alive until `close`."""
        self._check_open()
        code = self._engine.register_memory(memory.data_ptr(), memory.numel())
        if code == 0:
            self._registered.append(memory)
            return True
        if not self.why_unregistered:
            self.why_unregistered = _why_unregistered(code)
            _log.debug("io_uring transfers from unregistered memory: %s", self.why_unregistered)
        return False

    def close(self) -> None:
        """See `Engine`."""
        super().close()
        self._registered.clear()


def try_uring() -> None:
    """Read one byte through io_uring.

    Raises
    ------
    OSError
        If that does not work here.
    """
    fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    engine = _native.UringEngine(1, DEFAULT_PIECE_BYTES)
    try:
        byte = torch.empty(1, dtype=torch.uint8)
        engine.wait(engine.submit_read(fd, 0, byte.data_ptr(), 1))
    except _native.IoFailure as failure:
        raise OSError(failure.errno, os.strerror(failure.errno)) from None
    finally:
        engine.close()
        os.close(fd)


def why_unavailable(error: OSError) -> str:
    """The reason behind an error of opening a ring, and what could be done."""
    if error.errno in (errno.EPERM, errno.EACCES):
        if _setting() in ("1", "2"):
            return f"the system forbids io_uring: {_DISABLED} is {_setting()}"
        return "this process may not use io_uring: a container's seccomp profile forbids it, as Docker's default does"
    if error.errno == errno.ENOSYS:
        return f"no usable io_uring: Linux before 5.7, or hidden by a sandbox ({error.strerror})"
    if error.errno == errno.ENOMEM:
        return "io_uring may not lock memory for its queues: raise the limit (ulimit -l)"
    return f"io_uring failed: {error.strerror or error}"


def _why_unregistered(code: int) -> str:
    if code == errno.ENOMEM:
        lockable = lockable_bytes()
        limit = "the limit" if lockable is None else f"the limit, {format_bytes(lockable)},"
        return f"more than {limit} on locked memory (ulimit -l)"
    if code == errno.ENOSPC:
        return "more ranges than the kernel takes"
    if code in (errno.EINVAL, errno.EOPNOTSUPP):
        return "this kernel registers no memory piece by piece: that needs Linux 5.19"
    return os.strerror(code)


def _setting() -> str:
    try:
        return _DISABLED.read_text(encoding="ascii").strip()
    except OSError:
        return ""
