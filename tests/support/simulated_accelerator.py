"""A device with memory of its own that makes every missing order visible, on any machine and without a clock.

[Note: what the adversary does]
Torch's operations run when they are called, so compute is never behind. Copies are: what differs between the modes is
when they run. Whatever the mode:

- memory that is filled, emptied, or the target of a copy that has not run holds 0xFF, which is NaN in every dtype;
- each record of compute keeps what the device's memory held then. A copy to the host may only see what compute had
  written at the latest point that `copy_out` was put behind: if the bytes are others by now, it delivers poison;
- a copy to the device delivers poison if compute may still use what the memory held: for a refilled range, if neither
  `copy_in` nor the host is behind the point at which memory was last given back (any range's: an allocator may give the
  same block to another); for memory that compute has written to, if they are not behind compute's latest point;
- to give memory back under a copy that has not run is an error at once: it would destroy somebody else's bytes;
- so is to change host memory that a copy to the device reads before the host knows that the copy has run, by waiting
  for it, or for compute that was put behind it. It is found when the host knows, or at the end;
- so is work from the thread of hidden updates, which never touches the device;
- so is pinned memory that nobody has unpinned when the device is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from support.copy_streams import CopyPoint, CopyStream, EarlyStream, Job, LateStream, ThreadedStream
from support.hidden_turns import THREAD_NAME

from zerooffload.accelerator import Event, Mark, Stream
from zerooffload.accelerator.cpu import PassedMark
from zerooffload.accelerator.pages import populated_pages
from zerooffload.formats import MIB, round_up

POISON = 0xFF
_ROUNDING_BYTES = 512


class RaceError(AssertionError):
    """The program under test did what would destroy other memory on a real device."""


class Copies(Enum):
    """When copies run."""

    LATE = "late"
    """When somebody waits for them, or puts compute behind them."""
    EARLY = "early"
    """When they are enqueued."""
    THREADED = "threaded"
    """On a thread for each queue, after seeded tiny delays."""


_STREAMS: dict[Copies, type[CopyStream]] = {
    Copies.LATE: LateStream,
    Copies.EARLY: EarlyStream,
    Copies.THREADED: ThreadedStream,
}


@dataclass(eq=False)
class ComputePoint:
    """Compute's n-th recorded point, with the bytes of each filled range as they were then."""

    owner: SimulatedAccelerator
    number: int
    contents: dict[SimulatedRange, torch.Tensor] = field(repr=False)

    def wait(self) -> None:
        """The host is behind compute now."""
        self.owner.host_knows(self.number)

    def done(self) -> bool:
        """Asked without waiting, a device that runs late is not done."""
        return self.owner.host_is_behind(self.number)


@dataclass(frozen=True)
class _HostRead:
    """Host memory that the `position`-th copy to the device reads, with what it held when that was enqueued."""

    position: int
    source: torch.Tensor
    content: torch.Tensor


class ComputeStream:
    """Torch's operations on the calling thread.

    Attributes
    ----------
    num_copied_in : int
        Copies to the device that it was put behind.
    """

    def __init__(self, copy_in: CopyStream) -> None:
        self.num_copied_in = 0
        self._copy_in = copy_in

    def wait(self, event: Event) -> None:
        """As the thread is the queue, being behind a copy means that the copy runs now."""
        if isinstance(event, CopyPoint):
            event.pass_by()
            self.num_copied_in = max(self.num_copied_in, event.num_copies_of(self._copy_in))


class SimulatedRange:
    """See `DeviceRange`. Its addresses are always there; what it holds while empty is poison.

    Nor may it be looked at then: torch makes no view of memory that is not there.

    Attributes
    ----------
    memory : torch.Tensor
        All of it, always.
    copied_into, used_by_compute : bool
        Since it was filled.
    num_written_by_drives : int
        Reads of files into it that have not come.
    refill_after : int
        Number of the compute point that a copy into it must be behind.
    copied_out : tuple[int, torch.Tensor] or None
        The point that the last copy from it was put behind, and what the range held when it was enqueued.
    """

    def __init__(self, owner: SimulatedAccelerator, nbytes: int) -> None:
        self._owner = owner
        self.nbytes = owner.range_nbytes(nbytes)
        self.memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.is_filled = False
        self._reset(0)

    def _reset(self, refill_after: int) -> None:
        self.copied_into = False
        self.used_by_compute = False
        self.num_written_by_drives = 0
        self.refill_after = refill_after
        self.copied_out: tuple[int, torch.Tensor] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """While it is filled."""
        if not self.is_filled:
            raise RaceError("memory was looked at that is not there")
        return self.memory

    def fill(self) -> None:
        """Take memory."""
        if self.is_filled:
            raise RaceError("a filled range was filled again")
        self.is_filled = True
        self._reset(self._owner.last_release)
        self.memory.fill_(POISON)
        self._owner.took(self)

    def empty(self) -> None:
        """Give it back."""
        if not self.is_filled:
            raise RaceError("an empty range was emptied")
        self._owner.gave_back(self)
        self.is_filled = False
        self.memory.fill_(POISON)


class SimulatedAccelerator:
    """See the note above, and `Accelerator` for the protocol.

    Parameters
    ----------
    seed : int
        Of the delays, with `Copies.THREADED`.
    """

    name = "simulated"
    shares_host_memory = False

    def __init__(self, copies: Copies = Copies.LATE, *, capacity_bytes: int = 64 * MIB, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.copy_in, self.copy_out = (_STREAMS[copies](self.host_knows, seed + number) for number in (1, 2))
        self.copy_in.host_passed = self.host_passed_copies
        self.compute = ComputeStream(self.copy_in)
        self._pinned: set[int] = set()
        self._host_reads: list[_HostRead] = []
        # By compute's points: copies to the device that it was behind then.
        self._num_copied_in = {0: 0}
        self.last_release = 0
        self.filled_bytes = 0
        self.peak_filled_bytes = 0
        self.num_spoiled = 0
        self._capacity_bytes = capacity_bytes
        self._num_points = 0
        self._recording = threading.Lock()
        self._host_is_behind = 0
        # Held here: whoever keeps a range's tensor alone still has its memory.
        self._filled: set[SimulatedRange] = set()
        self._by_address: dict[int, SimulatedRange] = {}

    def range_nbytes(self, nbytes: int) -> int:
        """Always more than was asked for, so that nobody can leave the rounding out of a formula."""
        return round_up(nbytes, _ROUNDING_BYTES) + _ROUNDING_BYTES

    def reserve(self, nbytes: int) -> SimulatedRange:
        """An empty range."""
        memory = SimulatedRange(self, nbytes)
        self._by_address[memory.memory.untyped_storage().data_ptr()] = memory
        return memory

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Page-aligned host memory."""
        return populated_pages(nbytes)

    def pin(self, memory: torch.Tensor) -> bool:
        """What a driver would do, noted."""
        self._pinned.add(memory.data_ptr())
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo that."""
        if memory.data_ptr() not in self._pinned:
            raise RaceError("memory was unpinned that is not pinned")
        self._pinned.remove(memory.data_ptr())

    def record(self, stream: Stream) -> Event:
        """A point of compute is a new one each time."""
        _refuse_hidden_thread()
        if isinstance(stream, CopyStream):
            return stream.record()
        # Gradients are taken home by a thread of its own, which records too: later points have later contents.
        with self._recording:
            self._num_points += 1
            contents = {}
            # As they are now: others take and give back memory meanwhile.
            for memory in tuple(self._filled):
                contents[memory] = memory.memory.clone()
                if not memory.copied_into and bool((memory.memory != POISON).any()):
                    memory.used_by_compute = True
            self._num_copied_in[self._num_points] = self.compute.num_copied_in
            return ComputePoint(self, self._num_points, contents)

    def mark(self, stream: Stream) -> Mark:
        """Compute is never behind; a copy queue notes when each copy has run."""
        return stream.mark() if isinstance(stream, CopyStream) else PassedMark()

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue; what the target holds until the copy has run is poison."""
        _refuse_hidden_thread()
        if target.dtype is not torch.uint8 or target.shape != source.shape or source.dtype is not torch.uint8:
            raise RaceError("a copy is between bytes of one length")
        into, out_of = self._range_of(target), self._range_of(source)
        if stream is self.copy_in and into is not None and out_of is None:
            is_ordered = self._refill_is_ordered(into)
            into.copied_into = True
        elif stream is self.copy_out and out_of is not None and into is None:
            is_ordered = self._content_is_ordered(out_of, source)
            # What it overwrites may have been read by copies that it is behind, whatever the host knows.
            self._passed(self._num_copied_in[self._behind(self.copy_out)], within=target)
            out_of.copied_out = (self._behind(self.copy_out), out_of.memory.clone())
        else:
            raise RaceError("copy_in is from the host to the device, copy_out the other way")
        self.num_spoiled += not is_ordered
        target.fill_(POISON)
        stream.enqueue(Job(target, source if is_ordered else torch.full_like(source, POISON)))
        if stream is self.copy_in:
            with self._recording:
                self._host_reads.append(_HostRead(self.copy_in.num_enqueued, source, source.clone()))

    def has(self, memory: torch.Tensor) -> bool:
        """Whether it is the device's."""
        return self._range_of(memory) is not None

    def drive_writes(self, target: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A drive begins to write to the device's memory; what is to be called with the bytes when they come."""
        _refuse_hidden_thread()
        into = self._range_of(target)
        if into is None or not into.is_filled:
            raise RaceError("a drive writes to memory that is not there")
        wanted = self._num_points if into.used_by_compute else into.refill_after
        is_ordered = self._host_is_behind >= wanted
        self.num_spoiled += not is_ordered
        into.copied_into = True
        into.num_written_by_drives += 1

        def arrive(content: torch.Tensor) -> None:
            into.num_written_by_drives -= 1
            target.copy_(content if is_ordered else torch.full_like(content, POISON))

        return arrive

    def available_bytes(self) -> int:
        """What is not filled."""
        return self._capacity_bytes - self.filled_bytes

    def trim(self) -> None:
        """What a range gives back is free at once."""

    def random_state(self) -> None:
        """Torch's own generator is the host's."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Nothing of its own."""

    def close(self) -> None:
        """End the threads, if there are any."""
        self.copy_in.close()
        self.copy_out.close()
        self.host_passed_copies(self.copy_in.num_enqueued)
        if self._pinned:
            raise RaceError("memory goes that a driver holds pinned: what is mapped there next would be copied wrongly")

    def host_knows(self, number: int) -> None:
        """The host has waited for something behind compute's point `number`."""
        self._host_is_behind = max(self._host_is_behind, number)
        self.host_passed_copies(self._num_copied_in[number])

    def host_passed_copies(self, position: int) -> None:
        """The host knows that so many copies to the device have run: what they read may change from now on."""
        self._passed(position)

    def _passed(self, position: int, within: torch.Tensor | None = None) -> None:
        """So many copies have run: all that they read may change, or what they read of some memory."""
        # Compared under the lock: another thread that knows so too, and goes on to change it, waits for that.
        with self._recording:
            passed = [
                read
                for read in self._host_reads
                if read.position <= position and (within is None or _overlap(read.source, within))
            ]
            self._host_reads = [read for read in self._host_reads if not any(read is one for one in passed)]
            if not all(torch.equal(read.source, read.content) for read in passed):
                raise RaceError("host memory was changed under a copy that nobody had waited for")

    def host_is_behind(self, number: int) -> bool:
        """Whether the host knows that compute has passed `number`."""
        return self._host_is_behind >= number

    def took(self, memory: SimulatedRange) -> None:
        """A range was filled."""
        self._filled.add(memory)
        self.filled_bytes += memory.nbytes
        self.peak_filled_bytes = max(self.peak_filled_bytes, self.filled_bytes)

    def gave_back(self, memory: SimulatedRange) -> None:
        """A range is emptied: from now on its memory may be anybody's."""
        if memory.num_written_by_drives or any(self._range_of(job.target) is memory for job in self.copy_in.pending()):
            raise RaceError("memory was given back while a copy into it had not run")
        self._filled.discard(memory)
        self.filled_bytes -= memory.nbytes
        used_until = self._num_points
        if memory.copied_out is not None and torch.equal(memory.copied_out[1], memory.memory):
            # Compute wrote it and has not touched it since it was copied out.
            used_until = memory.copied_out[0]
        self.last_release = max(self.last_release, used_until)

    def _range_of(self, tensor: torch.Tensor) -> SimulatedRange | None:
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def _behind(self, stream: CopyStream) -> int:
        point = stream.behind
        return point.number if isinstance(point, ComputePoint) else 0

    def _refill_is_ordered(self, memory: SimulatedRange) -> bool:
        if not memory.is_filled:
            raise RaceError("a copy into a range that is empty")
        wanted = self._num_points if memory.used_by_compute else memory.refill_after
        return max(self._behind(self.copy_in), self._host_is_behind) >= wanted

    def _content_is_ordered(self, memory: SimulatedRange, source: torch.Tensor) -> bool:
        if not memory.is_filled:
            raise RaceError("a copy out of a range that is empty")
        point = self.copy_out.behind
        if not isinstance(point, ComputePoint) or memory not in point.contents:
            return False
        start = source.data_ptr() - memory.memory.data_ptr()
        return torch.equal(point.contents[memory][start : start + source.numel()], source)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begins = [tensor.data_ptr() for tensor in (one, other)]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in (one, other)]
    return max(begins) < min(ends)


def _refuse_hidden_thread() -> None:
    if threading.current_thread().name == THREAD_NAME:
        raise RaceError("the thread of hidden updates gave work to the device")
