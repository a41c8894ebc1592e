"""Updates on their way: run at once, or behind the thread that trains.

[Note: a hidden update]
Behind the training thread, a thread of its own takes chunks through the streamed update, those of the flat that is
needed soonest first. It lives while there is work, touches files and host memory, and never the device, a hook or a
collective. Whoever needs a flat's new parameters waits for them, and neither for its other states nor for other flats.

[Note: an update ahead]
Where every state of a flat has a second place, its update may begin before `optimizer.step()`, with what the step is
expected to say. It changes nothing: the new states lie beside the old ones (see [Note: ahead] in tiers/api.py). `step`
then takes what it would have done itself, to the bit, and drops the rest. A dropped job's successor begins when nothing
of it is in flight any more: both write to the same places.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch

from zerooffload.errors import InternalError
from zerooffload.optim.stream import ChunkUpdate, StreamedUpdate
from zerooffload.runtime.update import FlatUpdate
from zerooffload.runtime.update_job import Jobs, Standing, StateUpdate, UpdateJob
from zerooffload.runtime.worker_thread import Idle, Outcome, WorkerThread
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Wait, Waitable, Waits, wait_for_all

_log = logging.getLogger("zerooffload")

GradientWritten = Callable[[UnitFlat, int], Waitable | None]


@dataclass(frozen=True, eq=False)
class _Landing:
    """A chunk of a state that is being written."""

    job: UpdateJob
    state: StateUpdate
    chunk: int
    writes: Sequence[Waitable]

    @property
    def is_over(self) -> bool:
        return all(write.done() for write in self.writes)


class UpdateQueue:
    """Runs updates. Its methods are for the thread that trains, those for updates ahead for any one.

    Parameters
    ----------
    gradient_written : callable
        Tells, of a chunk of a flat, what must be over before its gradient can be read.
    in_background : callable
        Makes a context in which the hidden thread works.

    Attributes
    ----------
    failure : BaseException or None
        What ended a hidden update that was to count: some states are a step ahead of others.
    has_told : bool
        Whether somebody who waited was told so.
    """

    def __init__(
        self,
        stream: StreamedUpdate,
        waits: Waits,
        *,
        gradient_written: GradientWritten = lambda _part, _chunk: None,
        in_background: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._gradient_written = gradient_written
        self.failure: BaseException | None = None
        self.has_told = False
        self._is_giving_way = False
        self._owner = os.getpid()
        self._stream = stream
        self._waits = waits
        self._thread = WorkerThread(
            "zerooffload-update",
            self._work,
            has_work=lambda: bool(self._waiting),
            failed=self._fail,
            in_background=in_background,
        )
        self._changed = self._thread.changed
        # By what is needed soonest; then what runs, in order: chunks that are staged, and those being written.
        self._waiting: list[tuple[int, UpdateJob]] = []
        self._staged: deque[tuple[UpdateJob, ChunkUpdate]] = deque()
        self._landing: list[_Landing] = []
        # Those that may not be over, and of these, those whose parameters nobody has waited for.
        self._hidden: dict[UnitFlat, UpdateJob] = {}
        self._unseen: dict[UnitFlat, UpdateJob] = {}
        self._ahead: dict[UnitFlat, UpdateJob] = {}

    def run(self, updates: Iterable[FlatUpdate], *, backwards: bool = False) -> None:
        """Update at once; returns when everything is home.

        Raises
        ------
        TierIOError
            If a state could not be read or written: the states of some chunks are new, those of others old.
        """
        self.wait_idle()
        with self._changed:
            self._enqueue((0, self._job(update, backwards=backwards)) for update in updates)
        try:
            self._work()
        except BaseException:
            self._clear()
            raise

    def begin(self, updates: Iterable[FlatUpdate], urgency: Mapping[UnitFlat, int]) -> None:
        """Update behind the training thread; the least urgency goes first.

        A flat whose home the device uses shows nothing until somebody has waited for it.
        """
        jobs = [self._job(update) for update in updates]
        for job in jobs:
            if job.update.part.range is None:
                job.update.part.flat.show_away()
        with self._changed:
            for job in jobs:
                job.after = self._ahead.pop(job.update.part, None)
            # Together, so that no failure and no Ctrl-C leaves one that is waited for and that nobody does.
            self._enqueue((urgency[job.update.part], job) for job in jobs)
            for job in jobs:
                self._hidden[job.update.part] = self._unseen[job.update.part] = job
        self._thread.wake()

    def begin_ahead(self, update: FlatUpdate, urgency: int) -> None:
        """Begin an update that is expected to be wanted, in place of an earlier one; the least `urgency` goes first."""
        job = self._job(update, ahead=True)
        with self._changed:
            self.drop_ahead([update.part])
            job.after = self._ahead.get(update.part) or self._hidden.get(update.part)
            self._enqueue([(urgency, job)])
            self._ahead[update.part] = job
        self._thread.wake()

    def take_ahead(self, updates: Sequence[FlatUpdate]) -> list[FlatUpdate]:
        """Let what was begun ahead count where it is what these updates say, to the bit; the updates left to do."""
        left = []
        with self._changed:
            for update in updates:
                job = self._ahead.get(update.part)
                is_right = job is not None and job.standing is Standing.OPEN and job.update.scalars == update.scalars
                if job is not None and is_right:
                    self._hidden[update.part] = self._unseen[update.part] = self._ahead.pop(update.part)
                    job.take()
                else:
                    left.append(update)
            self.drop_ahead()
        return left

    def drop_ahead(self, parts: Iterable[UnitFlat] | None = None) -> None:
        """What was begun ahead, of these flats or of all, is not wanted."""
        with self._changed:
            for part in list(self._ahead) if parts is None else parts:
                job = self._ahead.get(part)
                if job is not None:
                    job.drop()
                    if job.done():
                        del self._ahead[part]

    def under_way(self) -> Jobs:
        """All hidden jobs that nobody has waited for."""
        return Jobs(self._hidden.values())

    def hidden_jobs(self) -> dict[UnitFlat, UpdateJob]:
        """All hidden jobs that nobody has waited for, by flat."""
        return dict(self._hidden)

    def has_parameters(self, parts: Iterable[UnitFlat]) -> bool:
        """Whether `wait_for_parameters` would return at once, and well."""
        return all(self._unseen[part].param.is_well for part in parts if part in self._unseen)

    def wait_for_parameters(self, parts: Iterable[UnitFlat]) -> None:
        """Return when the parameters of these flats are those after the last step, and home.

        Raises
        ------
        TierIOError
            If they could not be updated.
        """
        for part in parts:
            job = self._unseen.get(part)
            if job is None:
                continue
            self._wait_for(job.param)
            if part.range is None:
                part.show_at_home()
            del self._unseen[part]

    def wait_for_steps(self, parts: Iterable[UnitFlat] | None = None) -> None:
        """Return when the last step of these flats, or of all, is computed: it reads no gradient any more.

        Raises
        ------
        TierIOError
            If a state could not be read.
        """
        for part in list(self._unseen) if parts is None else parts:
            job = self._unseen.get(part)
            if job is not None:
                self._wait_for(job.stepped)

    def lends(self, part: UnitFlat, chunks: Iterable[int]) -> bool:
        """Whether `lend` would find all of these chunks at once."""
        job = self._unseen.get(part)
        if part in self._ahead or (job is not None and not job.stepped.is_well):
            return False
        return all(self._stream.can_lend(part.home, chunk) for chunk in chunks)

    def lend(self, part: UnitFlat, chunk: int, use: Callable[[torch.Tensor], Waitable]) -> bool:
        """Let `use` read the parameters of a chunk as the last step has left them in memory, home or not.

        False if they are not there any more.
        """
        with self._changed:
            # What an update has left there ahead of its step is not what the parameters are.
            return part not in self._ahead and self._stream.lend(part.home, chunk, use)

    def finish(self) -> None:
        """Return when every unit's states are those after the last step.

        Raises
        ------
        TierIOError
            If some could not be read or written.
        """
        self.wait_for_parameters(list(self._unseen))
        for part, job in list(self._hidden.items()):
            self._wait_for(job)
            with self._changed:
                del self._hidden[part]

    def wait_idle(self) -> None:
        """Return when the hidden thread does nothing: what it uses can be used."""
        self.finish()
        if self._thread.is_busy:
            self._wait_busy(Idle(self._thread))

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Inside, the training thread waits for a drive: one chunk at a time goes there for updates."""
        self._is_giving_way = True
        try:
            yield
        finally:
            self._is_giving_way = False

    def close(self) -> None:
        """End what is under way. Errors are told by `failure`."""
        self.drop_ahead()
        with suppress(Exception):
            self.finish()
        if self._thread.is_busy:
            self._wait_busy(Idle(self._thread))

    def _job(self, update: FlatUpdate, *, backwards: bool = False, ahead: bool = False) -> UpdateJob:
        gradient_written = partial(self._gradient_written, update.part)
        chunks = update.chunks(backwards=backwards, ahead=ahead, gradient_written=gradient_written)
        return UpdateJob(update, chunks, ahead=ahead)

    def _wait_for(self, waitable: UpdateJob | Outcome) -> None:
        self._refuse_in_child()
        try:
            self._wait_busy(waitable)
        except Exception:
            self.has_told = True
            raise

    def _wait_busy(self, waitable: Waitable) -> None:
        # Ctrl-C may have come before somebody was found for the work.
        self._thread.wake()
        self._waits.until(Wait.UPDATE, waitable)

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._owner:
            raise InternalError(
                f"the parameters are being updated by process {self._owner}, of which this one was forked while it did:"
                " use the model there"
            )

    def _enqueue(self, jobs: Iterable[tuple[int, UpdateJob]]) -> None:
        self._waiting = sorted([*self._waiting, *jobs], key=lambda item: item[0])

    def _work(self) -> None:
        """Work until there is nothing to do."""
        while True:
            found = self._next() if self._may_stage else None
            if found is not None:
                self._stage(*found)
            elif self._staged:
                self._finish_first()
            elif self._landing:
                # The thread that trains may wait for parameters.
                self._land(min(self._landing, key=lambda landing: landing.state is not landing.job.param))
            else:
                break
            for landing in [landing for landing in self._landing if landing.is_over]:
                self._land(landing)

    @property
    def _may_stage(self) -> bool:
        """Who waits for a drive should not find it busy with what is needed later."""
        return self._stream.num_staged == 0 if self._is_giving_way else self._stream.has_room

    def _next(self) -> tuple[UpdateJob, ChunkUpdate, int] | None:
        with self._changed:
            for item in list(self._waiting):
                urgency, job = item
                if job.after is not None and not job.after.done():
                    continue
                # Else each would keep all those before it.
                job.after = None
                chunk = job.next_chunk()
                if chunk is not None:
                    return job, chunk, urgency
                self._waiting.remove(item)
        return None

    def _stage(self, job: UpdateJob, chunk: ChunkUpdate, urgency: int) -> None:
        # What is taken may overwrite an edit that it has read, as any update does.
        may = job.standing is Standing.TAKEN or all(block.may_write_ahead(chunk.chunk) for block in job.update.blocks)
        if not may:
            with self._changed:
                if job.standing is Standing.OPEN:
                    job.drop()
                    job.abandoned(chunk.chunk)
                    return
        self._stream.stage(chunk, urgency)
        self._staged.append((job, chunk))

    def _finish_first(self) -> None:
        job, chunk = self._staged.popleft()
        if job.standing is Standing.DROPPED:
            self._stream.abandon_first()
            with self._changed:
                job.abandoned(chunk.chunk)
        else:
            writes = self._stream.finish_first()
            with self._changed:
                job.has_stepped()
            self._landing.append(_Landing(job, job.param, chunk.chunk, writes.param))
            self._landing.append(_Landing(job, job.record, chunk.chunk, writes.others))

    def _land(self, landing: _Landing) -> None:
        self._landing.remove(landing)
        wait_for_all(self._waits, Wait.STATE_WRITE, landing.writes)
        with self._changed:
            landing.job.landed(landing.state, landing.chunk)

    def _clear(self) -> None:
        """After a failure: nothing is under way any more."""
        with self._changed:
            self._stream.abandon()
            # What failed is told by the failure that came first.
            with suppress(Exception):
                self._stream.settle()
            self._waiting.clear()
            self._staged.clear()
            self._landing.clear()

    def _fail(self, error: BaseException) -> None:
        """The thread cannot go on; nobody may be left waiting for what it had to do."""
        if not isinstance(error, Exception):
            # Ctrl-C is raised where it came; who waits later is not interrupted once more.
            interrupt, error = error, InternalError("an update was interrupted")
            error.__cause__ = interrupt
        jobs = {*self._hidden.values(), *self._ahead.values(), *(job for _, job in self._waiting)}
        self._clear()
        if any(job.standing is Standing.TAKEN and not job.done() for job in jobs):
            self.failure = error
        else:
            _log.warning("an update that ran ahead of its step failed, and is done again in it: %s", error)
        for job in jobs:
            job.fail(error)
        self._ahead.clear()
