"""`CudaAccelerator` itself, on tensors of the CPU: a driver is put in its place that does everything at once.

What it shows is torch's part: memory that is taken from under tensors and given back to them, and memory that is told
to a driver. What a device does late is for the simulated accelerator to show, and speed for a device.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.simulated_accelerator import RaceError

from zerooffload.accelerator import cuda
from zerooffload.accelerator.cuda import CudaAccelerator

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
_FREE_BYTES = 64 << 20


class Driver:
    """The functions of torch.cuda, and those of CUDA that torch hands on, as far as the accelerator calls them.

    Attributes
    ----------
    registered : dict[int, int]
        Bytes of host memory, by address.
    let_go : list[bytes]
        What memory began with when it was let go: it must still be there.
    refuses : bool
        To register any.
    num_forgotten : int
        Errors that were taken back.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.let_go: list[bytes] = []
        self.refuses = False
        self.num_forgotten = 0

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:  # noqa: N802 - CUDA's name
        """By addresses, whatever is mapped there."""
        overlaps = any(start < address + nbytes and address < start + taken for start, taken in self.registered.items())
        if self.refuses or overlaps:
            return ALREADY_REGISTERED
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Looks at the memory."""
        if address not in self.registered:
            return NOT_REGISTERED
        self.let_go.append(ctypes.string_at(address, 3))
        del self.registered[address]
        return 0

    def forget(self) -> None:
        """The last error."""
        self.num_forgotten += 1

    @staticmethod
    def check(status: int) -> None:
        """As torch does."""
        if status:
            raise RuntimeError(f"CUDA error {status}")


class _Stream:
    def wait_event(self, event: _Event) -> None:
        """Everything has happened."""


class _Event:
    def __init__(self, *, enable_timing: bool = False) -> None:
        del enable_timing
        self.seconds = 0.0

    def record(self, stream: _Stream) -> None:
        del stream
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It has."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.seconds - self.seconds)


@contextmanager
def cuda_on_cpu() -> Iterator[tuple[CudaAccelerator, Driver]]:
    """The accelerator, for tensors of the CPU, and its driver, which nothing may be left registered with."""
    driver, compute = Driver(), _Stream()
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "Stream": lambda _device: _Stream(),
            "Event": _Event,
            "stream": lambda _stream: nullcontext(),
            "device": lambda _device: nullcontext(),
            "current_stream": lambda _device: compute,
            "cudart": lambda: driver,
            "check_error": driver.check,
            "synchronize": lambda _device: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda _device: (_FREE_BYTES, _FREE_BYTES),
            "memory_reserved": lambda _device: 0,
            "memory_allocated": lambda _device: 0,
            "get_rng_state": lambda _device: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda _state, _device: None,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(cuda, "_forget_last_error", driver.forget)
        yield CudaAccelerator(torch.device("cpu")), driver
        if driver.registered:
            raise RaceError(f"{len(driver.registered)} pieces of memory are left registered")
