"""A flat's update on its way: which of its states are home, and whether it is to count."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from zerooffload.optim.stream import ChunkUpdate
from zerooffload.runtime.update import FlatUpdate
from zerooffload.runtime.worker_thread import Outcome
from zerooffload.tiers import Block


class Standing(Enum):
    """Whether what a job writes is to count."""

    OPEN = "nobody knows yet"
    TAKEN = "yes"
    DROPPED = "no"


class StateUpdate(Outcome):
    """One state of a flat on its way home, chunk by chunk; over when all of it is there. Its queue's lock guards it."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self._block = block
        self._num_in_flight = 0
        self._at_home: list[int] = []

    def begun(self) -> None:
        """One chunk more is in flight."""
        self._num_in_flight += 1

    def landed(self, chunk: int, *, is_written: bool) -> None:
        """A chunk is in flight no more."""
        self._num_in_flight -= 1
        if is_written:
            self._at_home.append(chunk)

    def settle(self, standing: Standing, *, ahead: bool) -> None:
        """All chunks were begun: if all have landed, and it is known whether they count, this is over."""
        if self.done() or self._num_in_flight or standing is Standing.OPEN:
            return
        for chunk in self._at_home if ahead else ():
            if standing is Standing.TAKEN:
                self._block.take_ahead(chunk)
            else:
                self._block.drop_ahead(chunk)
        self.over()


class UpdateJob:
    """A flat's update; can be waited for. Its queue's lock guards it.

    Attributes
    ----------
    stepped : Outcome
        Of the arithmetic: new parameters are in memory, and gradients are not read any more.
    param, record : StateUpdate
        Of the parameters, which are waited for alone where only they are needed, and of the optimizer's record.
    after : UpdateJob or None
        What must be over before this begins: it writes to the same places.
    """

    def __init__(self, update: FlatUpdate, chunks: Iterable[ChunkUpdate], *, ahead: bool) -> None:
        self.update = update
        self.param, self.record = (StateUpdate(block) for block in update.blocks)
        self.stepped = Outcome()
        self.standing = Standing.OPEN if ahead else Standing.TAKEN
        self.after: UpdateJob | None = None
        self._ahead = ahead
        self._chunks = iter(chunks)
        self._all_begun = False
        self._num_to_step = 0

    def next_chunk(self) -> ChunkUpdate | None:
        """The next chunk, which is in flight from now on; None if there is none left."""
        chunk = None if self.standing is Standing.DROPPED else next(self._chunks, None)
        if chunk is None:
            self._all_begun = True
            self._settle()
        else:
            self._num_to_step += 1
            self.param.begun()
            self.record.begun()
        return chunk

    def has_stepped(self) -> None:
        """A chunk is updated, and on its way home."""
        self._num_to_step -= 1
        self._settle()

    def landed(self, state: StateUpdate, chunk: int) -> None:
        """A chunk of a state is at home."""
        state.landed(chunk, is_written=True)
        self._settle()

    def abandoned(self, chunk: int) -> None:
        """A chunk was left as it is."""
        self._num_to_step -= 1
        self.param.landed(chunk, is_written=False)
        self.record.landed(chunk, is_written=False)
        self._settle()

    def take(self) -> None:
        """Its writes are to count."""
        self.standing = Standing.TAKEN
        self._settle()

    def drop(self) -> None:
        """Its writes are not to count."""
        self.standing = Standing.DROPPED
        self._all_begun = True
        self._settle()

    def fail(self, failure: BaseException) -> None:
        """What is not over ends with a failure."""
        for outcome in (self.stepped, self.param, self.record):
            if not outcome.done():
                outcome.over(failure)

    def wait(self) -> None:
        """Block until all states are home; raise what went wrong."""
        self.param.wait()
        self.record.wait()

    def done(self) -> bool:
        """Whether they are, or will never be."""
        return self.param.done() and self.record.done()

    def _settle(self) -> None:
        if self._all_begun:
            if not self._num_to_step and not self.stepped.done():
                self.stepped.over()
            self.param.settle(self.standing, ahead=self._ahead)
            self.record.settle(self.standing, ahead=self._ahead)


class Jobs:
    """Several jobs as one."""

    def __init__(self, jobs: Iterable[UpdateJob]) -> None:
        self._jobs = list(jobs)

    def wait(self) -> None:
        """Block until all are over; raise the first failure."""
        for job in self._jobs:
            job.wait()

    def done(self) -> bool:
        """Whether all are."""
        return all(job.done() for job in self._jobs)
