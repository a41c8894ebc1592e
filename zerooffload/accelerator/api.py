"""What a compute device offers: memory that can be emptied and refilled in place, copies, streams and events.

[Note: streams and who may run ahead]
Three queues run in their own order: `compute` (torch's operations), `copy_in` (host to device) and `copy_out`
(device to host). Nothing orders one after another but `Stream.wait`; nothing orders the host after a queue but
`Event.wait`. A device may run as late as it likes, and the host may be far ahead of it: every use of bytes that another
queue writes, and every reuse of bytes that another queue reads, needs one of the two. The simulated accelerator runs
copies as late as possible, so a missing wait gives wrong numbers on any machine.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's order."""

    def wait(self) -> None:
        """The calling thread waits until the stream has passed this point."""

    def done(self) -> bool:
        """Whether the stream has passed this point."""


class Mark(Event, Protocol):
    """A point in a stream's order that tells afterwards when the stream passed it."""

    def seconds(self) -> float | None:
        """On the clock of `time.perf_counter`; None while the stream has not passed it. Never blocks."""


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def wait(self, event: Event) -> None:
        """What is enqueued from now on runs after `event`. Does not block the calling thread."""


class DeviceRange(Protocol):
    """Bytes at fixed addresses on the device, whose memory can be given back and taken again.

    Autograd's saved views point into the range: refilling it brings their contents back, with no tensor replaced.

    Attributes
    ----------
    nbytes : int
        Memory taken while filled, as the allocator rounds it.
    tensor : torch.Tensor
        uint8, 1D, of the length asked for. Only to be touched while filled.
    """

    nbytes: int
    tensor: torch.Tensor

    def fill(self) -> None:
        """Take memory; its contents are undefined.

        The memory comes in the order of `copy_in`. Compute may write first too: what it may still read there is its
        own earlier work, and copies from there were waited for before the memory was given back.
        """

    def empty(self) -> None:
        """Give the memory back; whoever still reads it must be ordered before the next refill of any range."""


class Accelerator(Protocol):
    """A compute device.

    Attributes
    ----------
    name : str
        For messages: "cpu", "cuda:0".
    device : torch.device
        Where parameters are while full.
    shares_host_memory : bool
        The device computes on host memory: its tier aliases the host's instead of copying.
    compute, copy_in, copy_out : Stream
        See [Note: streams and who may run ahead].
    """

    name: str
    device: torch.device
    shares_host_memory: bool

    @property
    def compute(self) -> Stream:
        """The queue of torch's operations."""

    @property
    def copy_in(self) -> Stream:
        """The queue of copies from the host."""

    @property
    def copy_out(self) -> Stream:
        """The queue of copies to the host."""

    def range_nbytes(self, nbytes: int) -> int:
        """Memory that a range of `nbytes` takes, as the allocator rounds it."""

    def reserve(self, nbytes: int) -> DeviceRange:
        """An empty range for `nbytes` bytes."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory for transfers: uint8, 1D, page-aligned, resident, and pinned where the device profits.

        It is let go by itself; copies from and to it are over by then.
        """

    def pin(self, memory: torch.Tensor) -> bool:
        """Pin page-aligned host memory that was not made by `host_buffer`, uint8, 1D, where the device profits.

        False if it would and could not: copies from and to it are right, only slower and not asynchronous. Else whoever
        pins it must `unpin` it before it goes.
        """

    def unpin(self, memory: torch.Tensor) -> None:
        """Take back what `pin` did; nothing may be on its way from or to that memory."""

    def record(self, stream: Stream) -> Event:
        """The point that `stream` has been given work up to."""

    def mark(self, stream: Stream) -> Mark:
        """`record`, for timelines."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy of equal-sized tensors on `copy_in` or `copy_out`."""

    def available_bytes(self) -> int:
        """Device memory that is free now."""

    def trim(self) -> None:
        """Give memory that is kept for later use back to the device, so that other programs can have it."""

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's random numbers, uint8 in host memory; None where it has none of its own."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Let random numbers go on from there."""
