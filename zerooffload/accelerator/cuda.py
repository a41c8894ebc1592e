"""CUDA as compute device. The only file that names torch.cuda.

[Note: pinned memory that goes]
The driver pins pages by their addresses and learns nothing of `munmap`. Memory that went while it was registered would
stay pinned, and what is mapped next at its addresses would be copied from and to the pages that are gone, without an
error. So whoever registers memory lets it go before the memory does: a host buffer by itself.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from zerooffload.accelerator.api import Event, Mark, Stream
from zerooffload.accelerator.pages import PageRange, host_buffer_nbytes
from zerooffload.errors import InternalError
from zerooffload.formats import MIB, round_up

# torch's caching allocator: small blocks are multiples of 512 bytes, requests of 10 MiB and more of 2 MiB.
_SMALL_ROUNDING_BYTES = 512
_LARGE_REQUEST_BYTES = 10 * MIB
_LARGE_ROUNDING_BYTES = 2 * MIB
_REFERENCE_SECONDS = 4.0
"""How far an event may be from the clock's reference: float32 then still tells quarters of a microsecond."""


class CudaRange:
    """A storage that is resized between nothing and its length; the tensors over it stay valid.

    Memory is always taken under the `copy_in` stream: the allocator then hands a freed block only to that stream, which
    waits for compute before it refills. That makes `record_stream` (whose frees come at unknown times) unnecessary.
    """

    def __init__(self, nbytes: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.nbytes = cached_block_nbytes(nbytes)
        self._length_bytes = nbytes
        self._stream = stream
        self.tensor = torch.empty(0, dtype=torch.uint8, device=device)
        with torch.cuda.stream(stream):
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.tensor.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Take a block from the allocator, under `copy_in`."""
        with torch.cuda.stream(self._stream):
            self.tensor.untyped_storage().resize_(self._length_bytes)

    def empty(self) -> None:
        """Give the block back to the allocator."""
        self.tensor.untyped_storage().resize_(0)


class CudaStream:
    """A CUDA stream. Without one given: the stream that is current when it is used (torch's compute)."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def native(self) -> torch.cuda.Stream:
        """Torch's object."""
        return self._stream if self._stream is not None else torch.cuda.current_stream(self._device)

    def wait(self, event: Event) -> None:
        """Order later work after `event`, on the device."""
        if not isinstance(event, CudaEvent):
            raise InternalError(f"a CUDA stream cannot wait for {type(event).__name__}")
        self.native().wait_event(event.native)


class CudaEvent:
    """A recorded CUDA event."""

    def __init__(self, stream: CudaStream) -> None:
        self.native = torch.cuda.Event()
        self.native.record(stream.native())

    def wait(self) -> None:
        """Block the calling thread."""
        self.native.synchronize()

    def done(self) -> bool:
        """Ask without blocking."""
        return bool(self.native.query())


class DeviceClock:
    """Translates the times of a device's events to those of the host.

    An event's time is known only as a distance from another event's, a float32 in milliseconds. So there is a reference
    whose time on the host is known, and it moves along: far from it a distance would be too coarse.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._reference = torch.cuda.Event(enable_timing=True)
        self._reference.record(torch.cuda.current_stream(device))
        self._reference.synchronize()
        self._reference_seconds = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """When a timing event that has passed was passed."""
        distance_seconds = float(self._reference.elapsed_time(event)) / 1e3
        seconds = self._reference_seconds + distance_seconds
        if distance_seconds > _REFERENCE_SECONDS:
            self._reference, self._reference_seconds = event, seconds
        return seconds


class CudaMark:
    """A recorded timing event."""

    def __init__(self, stream: CudaStream, clock: DeviceClock) -> None:
        self._clock = clock
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream.native())

    def wait(self) -> None:
        """Block the calling thread."""
        self._event.synchronize()

    def done(self) -> bool:
        """Ask without blocking."""
        return bool(self._event.query())

    def seconds(self) -> float | None:
        """None while the device has not come to it."""
        return self._clock.seconds(self._event) if self.done() else None


class CudaAccelerator:
    """One CUDA device; see `Accelerator`."""

    shares_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self._copy_in = torch.cuda.Stream(device)
        self.compute = CudaStream(device)
        self.copy_in = CudaStream(device, self._copy_in)
        self.copy_out = CudaStream(device, torch.cuda.Stream(device))
        self._clock: DeviceClock | None = None

    def range_nbytes(self, nbytes: int) -> int:
        """As the caching allocator rounds a block."""
        return cached_block_nbytes(nbytes)

    def reserve(self, nbytes: int) -> CudaRange:
        """A storage of length zero."""
        return CudaRange(nbytes, self.device, self._copy_in)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Page-aligned memory of the exact size, registered: torch's pinned allocator rounds up to a power of two."""
        pages = PageRange(nbytes)
        pages.populate()
        if self.pin(pages.tensor):
            # See [Note: pinned memory that goes].
            pages.before_release(partial(_unregister_in, os.getpid(), self.device, pages.tensor.data_ptr()))
        return pages.tensor

    def pin(self, memory: torch.Tensor) -> bool:
        """Register its pages."""
        # On a thread that has used no device yet, the current one is the first of the machine, not this one.
        with torch.cuda.device(self.device):
            nbytes = host_buffer_nbytes(memory.numel())
            return _succeeded(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))

    def unpin(self, memory: torch.Tensor) -> None:
        """Let its pages go."""
        with torch.cuda.device(self.device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def record(self, stream: Stream) -> Event:
        """An event at the end of what `stream` has been given."""
        if not isinstance(stream, CudaStream):
            raise InternalError(f"not a CUDA stream: {type(stream).__name__}")
        return CudaEvent(stream)

    def mark(self, stream: Stream) -> Mark:
        """A timing event. The first one of all waits for the device, to learn how its clock goes."""
        if not isinstance(stream, CudaStream):
            raise InternalError(f"not a CUDA stream: {type(stream).__name__}")
        if self._clock is None:
            self._clock = DeviceClock(self.device)
        return CudaMark(stream, self._clock)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous where the host side is pinned."""
        if not isinstance(stream, CudaStream):
            raise InternalError(f"not a CUDA stream: {type(stream).__name__}")
        with torch.cuda.stream(stream.native()):
            target.copy_(source, non_blocking=True)

    def available_bytes(self) -> int:
        """What the driver says is free, and what the allocator holds in reserve."""
        free, _total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held

    def trim(self) -> None:
        """What torch's caching allocator holds in reserve."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def random_state(self) -> torch.Tensor:
        """The device's default generator."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """The device's default generator."""
        torch.cuda.set_rng_state(state, self.device)


def cached_block_nbytes(nbytes: int) -> int:
    """What the caching allocator takes for so many bytes, on any machine."""
    rounding = _LARGE_ROUNDING_BYTES if nbytes >= _LARGE_REQUEST_BYTES else _SMALL_ROUNDING_BYTES
    return round_up(max(nbytes, 1), rounding)


def _unregister_in(process: int, device: torch.device, address: int) -> None:
    """Let pages go, if this is still the process that registered them; the end of that lets all go."""
    if os.getpid() == process and not sys.is_finalizing():
        with torch.cuda.device(device):
            _succeeded(torch.cuda.cudart().cudaHostUnregister(address))


def _succeeded(status: Any) -> bool:
    """Whether a call did; if not, it has set the last error, which is nobody else's."""
    if int(status) == 0:
        return True
    _forget_last_error()
    return False


def _forget_last_error() -> None:
    """Torch has no other way to it: when it launches a kernel it looks, raises, and so clears it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
