"""Commits, step by step, with a journal that only remembers; threads are joined through `settle`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from zerooffload import RankError, TierIOError
from zerooffload.journal import StepRecord
from zerooffload.runtime.commits import FAILED, Commits
from zerooffload.runtime.update_queue import Jobs
from zerooffload.telemetry import Waits
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import SlotTable

RUN_ID = bytes(16)


@dataclass
class Remembering:
    """A journal and an agreement: what they were asked, in order."""

    calls: list[Any] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    least_of_others: int | None = None
    failure: Exception | None = None
    flushed: threading.Event = field(default_factory=threading.Event)

    def flush_states(self) -> None:
        self.calls.append("flush")
        self.flushed.set()

    def write(self, record: StepRecord) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append(("write", record.sequence, record.step))
        self.records.append(record)

    def give_up_after(self, sequence: int) -> None:
        self.calls.append(("give up after", sequence))

    def least(self, mine: int) -> int:
        self.calls.append(("least", mine))
        return mine if self.least_of_others is None else min(mine, self.least_of_others)

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class Loop:
    """A user's loop: a table of two chunks, and what is taken late."""

    seen: Remembering
    slots: SlotTable
    commits: Commits
    late: list[dict[str, Any] | None]

    def step(self, number: int, *chunks: int) -> None:
        """An optimizer's step that writes these chunks."""
        self.commits.settle()
        for chunk in chunks:
            self.slots.wrote(chunk, self.slots.begin_write(chunk), number)
        self.commits.begin(number, {"at step": number}, Jobs([]))


@pytest.fixture(params=[False, True], ids=["when settled", "in background"])
def loop(request: pytest.FixtureRequest) -> Loop:
    seen, slots = Remembering(), SlotTable()
    slots.add(2, 2)
    late: list[dict[str, Any] | None] = [{"late": "at begin"}]
    commits = Commits(
        seen,  # type: ignore[arg-type]
        slots,
        seen,
        Waits(CountingRecorder()),
        run_id=RUN_ID,
        take_late=lambda at_forward: None if late[0] is None else {**late[0], "at forward": at_forward},
        in_background=request.param,
    )
    return Loop(seen, slots, commits, late)


def test_a_step_is_committed_when_the_next_forward_begins(loop: Loop) -> None:
    loop.step(1, 0)
    assert loop.seen.records == []
    loop.late[0] = {"late": "after the step"}
    loop.commits.seal(at_forward=True)
    loop.late[0] = {"late": "too late"}
    loop.commits.seal(at_forward=True)
    loop.commits.settle()
    assert loop.seen.calls == ["flush", ("write", 1, 1), ("least", 1)]
    (record,) = loop.seen.records
    assert record.run_id == RUN_ID
    assert record.state == {"at step": 1, "late": "after the step", "at forward": True}
    assert record.chunks.slots.tolist() == [1, 0]
    assert record.chunks.checksums.tolist() == [1, 0]
    assert (loop.commits.step, loop.commits.sequence) == (1, 1)


def test_what_is_committed_is_not_written_to(loop: Loop) -> None:
    loop.step(1, 0, 1)
    loop.step(2, 0)
    loop.step(3, 0, 1)
    loop.commits.close()
    assert [record.step for record in loop.seen.records] == [1, 2, 3]
    assert [record.chunks.slots.tolist() for record in loop.seen.records] == [[1, 1], [0, 1], [1, 0]]
    assert loop.seen.calls[-1] == "close"


def test_an_edit_after_the_step_belongs_to_it_and_is_flushed_too(loop: Loop) -> None:
    loop.step(1, 0)
    # Where there is a thread: its flush comes before the edit, as late as that may be.
    if loop.commits._in_background:
        assert loop.seen.flushed.wait(10)
    for chunk, checksum in ((0, 10), (1, 11)):
        slot = loop.slots.begin_write(chunk)
        assert slot == 1
        loop.slots.wrote(chunk, slot, checksum)
    assert loop.seen.records == []
    loop.commits.settle()
    assert loop.seen.calls == ["flush", "flush", ("write", 1, 1), ("least", 1)]
    assert loop.seen.records[0].chunks.slots.tolist() == [1, 1]
    assert loop.seen.records[0].chunks.checksums.tolist() == [10, 11]


def test_an_edit_after_the_next_forward_belongs_to_the_next_step(loop: Loop) -> None:
    loop.step(1, 0)
    loop.commits.seal(at_forward=True)
    assert loop.slots.begin_write(0) == 0
    assert loop.commits.step == 1
    assert loop.seen.records[0].chunks.slots.tolist() == [1, 0]


def test_a_step_without_a_forward_after_it_is_committed_at_the_end(loop: Loop) -> None:
    loop.step(1, 0)
    loop.commits.close()
    assert loop.seen.records[0].state == {"at step": 1, "late": "at begin", "at forward": False}


def test_what_was_taken_at_begin_counts_if_the_run_is_gone(loop: Loop) -> None:
    loop.step(1, 0)
    loop.late[0] = None
    loop.commits.close()
    assert loop.seen.records[0].state == {"at step": 1, "late": "at begin", "at forward": False}


def test_nothing_to_settle(loop: Loop) -> None:
    loop.commits.settle()
    loop.commits.seal(at_forward=True)
    loop.commits.close()
    assert loop.seen.calls == ["close"]


def test_another_rank_failed(loop: Loop) -> None:
    loop.step(1, 0)
    loop.seen.least_of_others = FAILED
    for _ in range(2):
        with pytest.raises(RankError, match="another rank could not finish or commit step 1"):
            loop.commits.settle()
    assert loop.commits.step == 0
    with pytest.raises(RankError):
        loop.slots.begin_write(0)
    loop.commits.close()
    assert loop.seen.calls[-1] == "close"


def test_a_record_that_cannot_be_written_is_told_to_the_others_and_to_whoever_waits(loop: Loop) -> None:
    loop.step(1, 0)
    loop.seen.failure = TierIOError("write", "record", 5)
    for call in (loop.commits.settle, lambda: loop.commits.begin(2, {}, Jobs([])), lambda: loop.slots.begin_write(0)):
        with pytest.raises(TierIOError, match="record"):
            call()
    assert loop.seen.calls == ["flush", ("least", FAILED)]
    assert loop.commits.step == 0


@pytest.mark.parametrize(
    "end",
    [lambda commits: commits.seal(at_forward=True), Commits.settle, Commits.close],
    ids=["seal", "settle", "close"],
)
def test_a_state_that_cannot_be_taken_is_told_to_the_others_too(loop: Loop, end: Callable[[Commits], None]) -> None:
    loop.step(1, 0)
    loop.slots.lost(1, TierIOError("write", "states", 5))
    with pytest.raises(TierIOError, match="states"):
        end(loop.commits)
    with pytest.raises(TierIOError, match="states"):
        loop.commits.settle()
    assert loop.commits._pending is not None
    assert loop.commits._pending._over.wait(10)
    assert ("least", FAILED) in loop.seen.calls
    assert loop.seen.records == []


def test_a_step_that_failed_is_told_to_the_others(loop: Loop) -> None:
    said = threading.Event()
    loop.seen.least = lambda mine: (loop.seen.calls.append(("least", mine)), said.set(), mine)[2]  # type: ignore[method-assign]
    loop.commits.fail()
    assert said.wait(10)
    assert loop.seen.calls == [("least", FAILED)]


def test_what_came_after_the_record_that_is_continued_is_given_up(loop: Loop) -> None:
    loop.step(1, 0)
    loop.commits.settle()
    loop.commits.continue_from(loop.seen.records[0])
    assert loop.seen.calls[-1] == ("give up after", 1)


class WrittenLater:
    """Writes of a step that somebody is still at."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(10)

    def done(self) -> bool:
        return self.over.is_set()


def test_who_makes_room_does_not_wait_for_a_step_that_waits_for_him(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update ahead asks for room when the step before is not settled; meanwhile the next one, its own, begins."""
    commits, written = loop.commits, WrittenLater()
    loop.step(1, 0)
    commits.seal(at_forward=True)
    really_settle = commits._settle

    def settle_late(commit: Any) -> None:
        monkeypatch.setattr(commits, "_settle", really_settle)
        commits.settle()
        commits.begin(2, {}, written)
        really_settle(commit)

    monkeypatch.setattr(commits, "_settle", settle_late)
    commits.make_room()
    assert commits.step == 1
    written.over.set()
    commits.close()
    assert commits.step == 2
