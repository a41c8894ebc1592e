"""Queues of copies that run as late as possible, as early as possible, or on threads."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from zerooffload.accelerator import Event

_MOST_DELAY_SECONDS = 3e-4
_TIME_LIMIT_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class Job:
    """A copy."""

    target: torch.Tensor
    source: torch.Tensor

    def run(self) -> None:
        """Copy now."""
        self.target.copy_(self.source)


class Numbered(Event, Protocol):
    """A point of compute."""

    number: int


class CopyPoint:
    """A point in a copy queue."""

    def __init__(self, stream: CopyStream, position: int, behind: int) -> None:
        self._stream = stream
        self._position = position
        self._behind = behind

    def wait(self) -> None:
        """The host waits: it then knows, too, that compute has passed what the queue was behind."""
        self._stream.run_until(self._position)
        self._tell_host()

    def done(self) -> bool:
        """Asked without waiting."""
        is_done = self._stream.num_done >= self._position
        if is_done:
            self._tell_host()
        return is_done

    def pass_by(self) -> None:
        """Another queue gets behind this point, without the host."""
        self._stream.run_until(self._position)

    def num_copies_of(self, stream: CopyStream) -> int:
        """How many copies of a queue are before this point; 0 of another queue's."""
        return self._position if stream is self._stream else 0

    def _tell_host(self) -> None:
        self._stream.host_passed(self._position)
        self._stream.host_knows(self._behind)


class CopyMark:
    """A point in a copy queue that tells when it was passed."""

    def __init__(self, stream: CopyStream, position: int) -> None:
        self._stream = stream
        self._position = position
        self._made_seconds = time.perf_counter()

    def wait(self) -> None:
        """The copies before it run now."""
        self._stream.run_until(self._position)

    def done(self) -> bool:
        """Whether they have run."""
        return self._stream.num_done >= self._position

    def seconds(self) -> float | None:
        """When the last of them had run, but not before the mark was made."""
        if not self.done():
            return None
        return max([self._made_seconds, *self._stream.done_seconds[: self._position][-1:]])


class CopyStream:
    """A queue of copies. When they run is the subclasses' affair.

    Attributes
    ----------
    behind : Event or None
        The latest point of compute that the queue was put behind.
    num_done : int
        Copies that have run.
    done_seconds : list[float]
        When each of them had, by `time.perf_counter`.
    host_passed : callable
        Told how many copies the host knows to have run.
    """

    def __init__(self, host_knows: Callable[[int], None], seed: int) -> None:
        self.host_knows = host_knows
        self.host_passed: Callable[[int], None] = lambda _: None
        self.behind: Numbered | None = None
        self.num_done = 0
        self.done_seconds: list[float] = []
        self._num_enqueued = 0
        self._jobs: deque[Job] = deque()
        # The thread that trains and the one that brings gradients down use the same queue.
        self._turn = threading.RLock()
        self._random = random.Random(seed)  # noqa: S311 - reproducible delays

    def wait(self, event: Event) -> None:
        """See `Stream`. Being behind another copy queue lets that one run now: nothing here relies on its lateness."""
        if isinstance(event, CopyPoint):
            event.pass_by()
            return
        number: int = event.number  # type: ignore[attr-defined]
        if self.behind is None or number > self.behind.number:
            self.behind = event  # type: ignore[assignment]

    @property
    def num_enqueued(self) -> int:
        """Copies that it was given."""
        return self._num_enqueued

    def record(self) -> CopyPoint:
        """The point behind what was enqueued so far."""
        return CopyPoint(self, self._num_enqueued, self.behind.number if self.behind is not None else 0)

    def mark(self) -> CopyMark:
        """That point, with the time at which it is passed."""
        return CopyMark(self, self._num_enqueued)

    def enqueue(self, job: Job) -> None:
        """Take a copy."""
        with self._turn:
            self._num_enqueued += 1
            self._jobs.append(job)

    def pending(self) -> list[Job]:
        """Copies that have not run."""
        return list(self._jobs)

    def run_until(self, position: int) -> None:
        """Return when the first `position` copies have run."""
        raise NotImplementedError

    def close(self) -> None:
        """Give threads back."""

    def _run_first(self) -> None:
        self._jobs[0].run()
        self._jobs.popleft()
        self._note_done()

    def _note_done(self) -> None:
        self.done_seconds.append(time.perf_counter())
        self.num_done += 1


class LateStream(CopyStream):
    """Copies run when somebody needs them, in order."""

    def run_until(self, position: int) -> None:
        """Run what has not run."""
        with self._turn:
            while self.num_done < position:
                self._run_first()


class EarlyStream(CopyStream):
    """Copies run at once."""

    def enqueue(self, job: Job) -> None:
        """Run it."""
        with self._turn:
            super().enqueue(job)
            self._run_first()

    def run_until(self, position: int) -> None:
        """Nothing is ever left."""


class ThreadedStream(CopyStream):
    """Copies run on a thread, in order, each after a delay."""

    def __init__(self, host_knows: Callable[[int], None], seed: int) -> None:
        super().__init__(host_knows, seed)
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def enqueue(self, job: Job) -> None:
        """Wake the thread."""
        with self._changed:
            super().enqueue(job)
            self._changed.notify_all()

    def run_until(self, position: int) -> None:
        """Wait for the thread."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_done >= position, _TIME_LIMIT_SECONDS):
                raise TimeoutError("a simulated copy has not run")

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
            time.sleep(self._random.random() * _MOST_DELAY_SECONDS)
            self._jobs[0].run()
            with self._changed:
                self._jobs.popleft()
                self._note_done()
                self._changed.notify_all()
