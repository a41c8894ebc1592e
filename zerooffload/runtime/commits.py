"""Committing steps behind the training thread.

[Note: a commit]
A commit begins with `optimizer.step()`. A thread of its own waits until the step's writes are done (hidden ones go on
when `step` has returned) and flushes them, while the user's loop goes on; when the next training forward begins, what
the loop did after the step is taken too (see `tracking`), the record is written, and the ranks tell each other that
they are that far. Before the next step writes to a slot, the commit must be over on every rank: usually it is by then.

Parameters that the loop edits after the step belong to it too. They are written where the step's own writes are, which
no record names yet, and flushed before it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zerooffload.errors import RankError
from zerooffload.journal import Journal, StepRecord
from zerooffload.runtime.worker_thread import Outcome
from zerooffload.sharding.collectives import StepAgreement
from zerooffload.telemetry import Wait, Waitable, Waits
from zerooffload.tiers import SlotState, SlotTable

FAILED = -1
"""What a rank says that could not finish or commit its step."""


class _Commit(Outcome):
    """A step on its way to being durable; can be waited for."""

    def __init__(self, sequence: int, step: int, state: dict[str, Any], written: Waitable) -> None:
        super().__init__()
        self.sequence = sequence
        self.step = step
        self.state = state
        self.written = written
        self.chunks: SlotState | None = None
        self.sealed = threading.Event()
        self.left_drive = threading.Event()
        self.was_edited = False
        self.error: BaseException | None = None


class Commits:
    """One commit after the other. All methods are for the thread that trains; `make_room` is for whoever writes.

    Parameters
    ----------
    agreement : StepAgreement
        Used by the committing thread alone, in the order of the steps.
    take_late : callable
        What is taken when the next training forward begins; returns None once the run is gone. Given whether a forward
        begins.
    sequence, step : int
        Of the commit that the run goes on from.
    in_background : bool
        Use a thread; otherwise a commit is made when it is waited for.

    Attributes
    ----------
    step, sequence : int
        Of the newest commit.
    may_be_needed : bool
        Whether some rank may have committed a step: what lies on files must then outlive the run.
    """

    def __init__(
        self,
        journal: Journal,
        slots: SlotTable,
        agreement: StepAgreement,
        waits: Waits,
        *,
        run_id: bytes,
        sequence: int = 0,
        step: int = 0,
        take_late: Callable[[bool], dict[str, Any] | None],
        in_background: bool = True,
    ) -> None:
        self.step = step
        self.sequence = sequence
        self.may_be_needed = step > 0
        self._journal = journal
        self._slots = slots
        self._agreement = agreement
        self._waits = waits
        self._run_id = run_id
        self._take_late = take_late
        self._in_background = in_background
        self._pending: _Commit | None = None
        self._failure: BaseException | None = None
        # Held while somebody settles: the thread that trains, or that of hidden updates.
        self._settling = threading.RLock()
        slots.make_room = self.make_room

    def begin(self, step: int, state: dict[str, Any], written: Waitable) -> None:
        """Make a step durable, once its writes are. `state` was taken when `step()` was called."""
        self.settle()
        self.may_be_needed = True
        try:
            late = self._take_late(False) or {}
            commit = _Commit(self.sequence + 1, step, {**state, **late}, written)
            if self._in_background:
                threading.Thread(target=self._run, args=(commit,), name="zerooffload-commit", daemon=True).start()
        except BaseException as error:
            # The step is done and nobody commits it: its slots must not be written to, so no other step may follow.
            self._failure = error
            raise
        self._pending = commit

    def continue_from(self, record: StepRecord) -> None:
        """Nothing after this record counts any more.

        Raises
        ------
        TierIOError
            If what came after it could not be made void.
        """
        self._journal.give_up_after(record.sequence)

    def seal(self, *, at_forward: bool) -> None:
        """The user's loop is through with the step: take what it did."""
        commit = self._pending
        if commit is None or commit.sealed.is_set():
            return
        failure: Exception | None = None
        try:
            commit.state.update(self._take_late(at_forward) or {})
            if commit.written.done():
                # Raises if an edit was lost.
                self._slots.state()
        except Exception as error:  # noqa: BLE001 - raised below, when the thread that commits knows
            commit.error = failure = error
        commit.sealed.set()
        if not self._in_background:
            self._run(commit)
        if failure is not None:
            raise failure

    def make_room(self) -> None:
        """A slot is about to be written to: return when that harms no step that is committed or about to be.

        What is written before a step's own writes are done is one of them; then, until it is sealed, an edit of it.

        Raises
        ------
        TierIOError, RankError
            See `settle`.
        """
        commit = self._pending
        if self._failure is None and commit is not None and not commit.written.done():
            return
        if self._failure is None and commit is not None and not commit.sealed.is_set():
            commit.was_edited = True
        else:
            # That one: a step that the training thread decides meanwhile waits for who asks here.
            self._settle(commit)

    def settle(self) -> None:
        """Return when the newest step is committed on every rank.

        Raises
        ------
        TierIOError
            If it could not be: the one before still is.
        RankError
            If another rank could not, or is gone.
        """
        self._settle(self._pending)

    def _settle(self, commit: _Commit | None) -> None:
        with self._settling:
            if self._failure is not None:
                raise self._failure
            if commit is None or commit is not self._pending:
                return
            try:
                self.seal(at_forward=False)
                self._waits.until(Wait.COMMIT, commit)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._failure = error
                raise
            if commit.chunks is not None:
                self._slots.commit(commit.chunks)
            self.sequence, self.step = commit.sequence, commit.step
            self._pending = None

    def fail(self) -> None:
        """Let the other ranks, which may wait for it, know that this one could not finish its step."""
        self.may_be_needed = True
        # They may come late or never, so nobody here waits for them.
        threading.Thread(target=self._say_failed, name="zerooffload-commit", daemon=True).start()

    def give_up(self, error: BaseException) -> None:
        """What is newest is no step any more: one that is not sealed is not committed, nor is any other."""
        commit, self._failure = self._pending, error
        if commit is None or commit.sealed.is_set() or not self._in_background:
            self.fail()
            return
        commit.error = error
        commit.sealed.set()
        # Its files may be closed next. That others know is not waited for.
        commit.left_drive.wait()

    def close(self) -> None:
        """Finish what is under way; again is harmless.

        Raises
        ------
        ZeroOffloadError
            If that fails.
        """
        try:
            if self._failure is None:
                self.settle()
        finally:
            self._journal.close()

    def _run(self, commit: _Commit) -> None:
        mine = FAILED
        try:
            commit.written.wait()
            self._journal.flush_states()
            commit.sealed.wait()
            if commit.error is None:
                if commit.was_edited:
                    self._journal.flush_states()
                commit.chunks = self._slots.state()
                record = StepRecord(self._run_id, commit.sequence, commit.step, commit.chunks, commit.state)
                self._journal.write(record)
                mine = commit.sequence
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            commit.error = error
        commit.left_drive.set()
        try:
            least = self._agreement.least(mine)
            if least != commit.sequence and commit.error is None:
                commit.error = RankError(f"another rank could not finish or commit step {commit.step}")
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            commit.error = commit.error or error
        commit.over(commit.error)

    def _say_failed(self) -> None:
        with suppress(RankError):
            self._agreement.least(FAILED)
