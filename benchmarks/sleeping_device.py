"""A device whose compute takes time and nothing else: a machine with few cores can stand for one with a GPU.

Compute is a queue that sleeps for the seconds that it is given, and so do copies, each direction for itself, as the
engines of a GPU take no core. What torch would do on the device beside the model's blocks, collecting gradients, is
left out: the host would have to do it. So the device's memory holds what it was made with, gradients are the same in
every step, and only those are moved that the host does not hold yet.

A core can copy instead (a thread for each direction): a device as slow as this machine can be one.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerooffload.accelerator import Event, Mark, Stream, host_buffer_nbytes, populated_pages
from zerooffload.formats import GIB

GRADIENT = 1e-3
"""Each element of each gradient."""
_PROBED_BYTES = 64


class QueuePoint:
    """A point in a queue's order."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._seconds: float | None = None

    def wait(self) -> None:
        """Until the queue has passed it."""
        self._passed.wait()

    def done(self) -> bool:
        """Whether it has."""
        return self._passed.is_set()

    def seconds(self) -> float | None:
        """When it did."""
        return self._seconds

    def is_passed(self, seconds: float) -> None:
        """Now."""
        self._seconds = seconds
        self._passed.set()


class DeviceQueue:
    """Work in its own order, on a thread of its own.

    The time at which a piece of work ends is computed, not read from the clock, so that late wake-ups do not add up.

    Attributes
    ----------
    busy_seconds, behind_seconds, starved_seconds : float
        Its time so far: at work, behind events of other queues, and without anything to do.
    """

    def __init__(self, name: str) -> None:
        self.busy_seconds = self.behind_seconds = self.starved_seconds = 0.0
        self._now = time.perf_counter()
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, event: Event) -> None:
        """See `Stream`."""

        def be_behind() -> None:
            event.wait()
            passed = event.seconds() if isinstance(event, QueuePoint) else None
            until = max(self._now, passed or time.perf_counter())
            self.behind_seconds += until - self._now
            self._now = until

        if not event.done():
            self._items.put(be_behind)

    def record(self) -> QueuePoint:
        """The point behind what was enqueued so far."""
        point, made = QueuePoint(), time.perf_counter()

        def pass_by() -> None:
            self._starve_until(made)
            point.is_passed(self._now)

        self._items.put(pass_by)
        return point

    def sleep(self, seconds: float) -> None:
        """Enqueue work that takes that long."""
        made = time.perf_counter()

        def work() -> None:
            self._take(made, seconds)

        self._items.put(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor, seconds: float | None = None) -> None:
        """Enqueue a copy: by a core, or of that many seconds. One thread: torch's copies would take all cores."""
        made = time.perf_counter()

        def by_core() -> None:
            begin = max(self._now, made, time.perf_counter())
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            self._now = begin
            self._take(begin, time.perf_counter() - begin)

        def by_engine() -> None:
            nbytes = _PROBED_BYTES if _ends_alike(target, source) else source.nbytes
            ctypes.memmove(target.data_ptr(), source.data_ptr(), min(nbytes, source.nbytes))
            self._take(made, seconds or 0.0)

        self._items.put(by_core if seconds is None else by_engine)

    def close(self) -> None:
        """End the thread."""
        self._items.put(None)
        self._thread.join()

    def _take(self, made: float, seconds: float) -> None:
        self._starve_until(made)
        self._now += seconds
        self.busy_seconds += seconds
        left = self._now - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def _starve_until(self, seconds: float) -> None:
        until = max(self._now, seconds)
        self.starved_seconds += until - self._now
        self._now = until

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            item()


class DeviceMemory:
    """A range that keeps its memory: giving it back and taking it again costs a device nothing."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = host_buffer_nbytes(nbytes)
        self.tensor = populated_pages(self.nbytes)[:nbytes]
        populated = self.tensor[: nbytes // 4 * 4]
        populated.view(torch.float32).fill_(GRADIENT)

    def fill(self) -> None:
        """Nothing to do."""

    def empty(self) -> None:
        """Nothing to do."""


class SleepingAccelerator:
    """See the note above, and `zerooffload.accelerator.Accelerator` for the protocol.

    Parameters
    ----------
    link_bytes_per_second : float, optional
        Of copies, in each direction, which take no core then. If it is missing a core copies, as fast as it can.
    """

    name = "sleeping"
    shares_host_memory = False

    def __init__(self, link_bytes_per_second: float | None = None) -> None:
        self.device = torch.device("cpu")
        self.compute, self.copy_in, self.copy_out = (
            DeviceQueue(name) for name in ("device-compute", "device-copy-in", "device-copy-out")
        )
        self.link_bytes_per_second = link_bytes_per_second
        self._storages: set[int] = set()

    def range_nbytes(self, nbytes: int) -> int:
        """Rounded up to a page."""
        return host_buffer_nbytes(nbytes)

    def reserve(self, nbytes: int) -> DeviceMemory:
        """Memory of the device."""
        memory = DeviceMemory(nbytes)
        self._storages.add(memory.tensor.untyped_storage().data_ptr())
        return memory

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Resident pages."""
        return populated_pages(nbytes)

    def record(self, stream: Stream) -> Event:
        """A point in the queue."""
        return _queue(stream).record()

    def mark(self, stream: Stream) -> Mark:
        """The same: points tell when they were passed."""
        return _queue(stream).record()

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between contiguous bytes. Nobody looks at those that an engine brings to the device."""
        if self.link_bytes_per_second is None:
            _queue(stream).copy(target, source)
            return
        seconds = source.nbytes / self.link_bytes_per_second
        if stream is self.copy_in:
            self.copy_in.sleep(seconds)
        else:
            _queue(stream).copy(target, source, seconds)

    def available_bytes(self) -> int:
        """Enough for any window."""
        return 64 * GIB

    def random_state(self) -> None:
        """Torch's own generator is the host's."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Nothing of its own."""

    def operations(self) -> TorchDispatchMode:
        """A context in which what torch is to do in the device's memory is left out."""
        return _LeftOut(self._storages)

    def close(self) -> None:
        """End the threads."""
        for stream in (self.compute, self.copy_in, self.copy_out):
            stream.close()


def _ends_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bytes that were equal once still are: what changes them changes their end too, or their beginning."""
    return torch.equal(one[-_PROBED_BYTES:], other[-_PROBED_BYTES:])


class _LeftOut(TorchDispatchMode):
    """Leaves out copies into the device's memory, and sums with what is there."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_left_out = func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
        if is_left_out and args[0].untyped_storage().data_ptr() in self._storages:
            return args[0]
        return func(*args, **(kwargs or {}))


def _queue(stream: Stream) -> DeviceQueue:
    if not isinstance(stream, DeviceQueue):
        raise TypeError(f"not a queue of this device: {type(stream).__name__}")
    return stream
