"""Page-aligned host memory that several processes of one machine map.

It is a file in memory without a name: others open it through its maker's entry in /proc, and the kernel frees it with
the last process that maps it, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from zerooffload.accelerator.pages import host_buffer_nbytes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class SharedAddress:
    """By which other processes find the memory, as long as its maker has not mapped it.

    Attributes
    ----------
    machine : str
        Where it is; see `this_machine`.
    pid, descriptor : int
        Whose file it is.
    token : bytes
        What it holds: in another container the same numbers may be those of another file.
    """

    machine: str
    pid: int
    descriptor: int
    token: bytes


class SharedPages:
    """Memory for several buffers, which every process takes in the same order.

    Use `make` in one process and `open` in the others.
    """

    def __init__(self, descriptor: int, address: SharedAddress) -> None:
        self.address = address
        self._descriptor: int | None = descriptor
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken_nbytes = 0

    @classmethod
    def make(cls) -> Self:
        """New memory, of no length yet.

        Raises
        ------
        OSError
            If the system has no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError(f"{platform.system()} has no files in memory without a name")
        machine, token = this_machine(), secrets.token_bytes(_TOKEN_BYTES)
        descriptor = os.memfd_create("zerooffload")
        os.write(descriptor, token)
        return cls(descriptor, SharedAddress(machine, os.getpid(), descriptor, token))

    @classmethod
    def open(cls, address: SharedAddress) -> Self:
        """The memory that another process made.

        Raises
        ------
        OSError
            If it cannot be reached from here.
        """
        if address.machine != this_machine():
            raise OSError(f"it is on another machine ({address.machine})")
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0) != address.token:
            os.close(descriptor)
            raise OSError(f"process {address.pid} is another one here")
        return cls(descriptor, address)

    def map(self, nbytes: int) -> None:
        """Give it its length, the same in every process, and map it. Pages appear when they are first touched."""
        if self._descriptor is not None and nbytes:
            os.truncate(self._descriptor, nbytes)
            mapped = mmap.mmap(self._descriptor, nbytes)
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.close()

    def take(self, nbytes: int) -> torch.Tensor:
        """The next buffer: uint8, 1D, `[nbytes]`; it keeps the memory mapped."""
        start = self._taken_nbytes
        self._taken_nbytes += host_buffer_nbytes(nbytes)
        return self._memory[start : start + nbytes]

    def close(self) -> None:
        """No more than what is mapped is held from now on."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def shared_part_nbytes(nbytes: int, num_sharers: int) -> int:
    """What each of as many processes counts of a shared buffer of `nbytes`: together, all of it."""
    return host_buffer_nbytes(-(-nbytes // num_sharers))


def this_machine() -> str:
    """The running kernel, and the name that it gives this process's host."""
    return f"{platform.node()} {_BOOT_ID.read_text(encoding='ascii').strip()}"
