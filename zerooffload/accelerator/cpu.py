"""The CPU as compute device: its tier is host memory, its queues are the calling thread."""

from __future__ import annotations

import time

import psutil
import torch

from zerooffload.accelerator.api import Event, Mark, Stream
from zerooffload.accelerator.pages import PageRange, host_buffer_nbytes, populated_pages


class PassedEvent:
    """An event of a queue that is never behind."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """Always."""
        return True


class PassedMark(PassedEvent):
    """A point that was passed when it was made."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def seconds(self) -> float:
        """Then."""
        return self._seconds


class ImmediateStream:
    """A queue whose work is done when it is enqueued."""

    def wait(self, event: Event) -> None:
        """Finish what `event` stands for before the next work."""
        event.wait()


class CpuAccelerator:
    """Computes on host memory; see `Accelerator`."""

    name = "cpu"
    shares_host_memory = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute = self.copy_in = self.copy_out = ImmediateStream()

    def range_nbytes(self, nbytes: int) -> int:
        """Rounded up to a page."""
        return host_buffer_nbytes(nbytes)

    def reserve(self, nbytes: int) -> PageRange:
        """Address space without memory."""
        return PageRange(nbytes)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Resident pages; there is no device to pin them for."""
        return populated_pages(nbytes)

    def pin(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """There is no device to pin it for."""
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        """It never was."""

    def record(self, stream: Stream) -> Event:  # noqa: ARG002 - all streams are one
        """All queues are up to date."""
        return PassedEvent()

    def mark(self, stream: Stream) -> Mark:  # noqa: ARG002 - all streams are one
        """Now."""
        return PassedMark()

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:  # noqa: ARG002
        """Copies at once."""
        target.copy_(source)

    def available_bytes(self) -> int:
        """The machine's available memory."""
        return int(psutil.virtual_memory().available)

    def trim(self) -> None:
        """Pages are given back at once."""

    def random_state(self) -> None:
        """Torch's own generator is the host's."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Nothing of its own."""
