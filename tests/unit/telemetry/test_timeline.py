from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.simulated_accelerator import Copies, SimulatedAccelerator

from zerooffload import TierIOError
from zerooffload.accelerator.cpu import CpuAccelerator, PassedEvent
from zerooffload.accelerator.pages import populated_pages
from zerooffload.telemetry import Batch, Lane, Level, Recorder, StepReport, Timeline, Wait, Waits, Work, timeline
from zerooffload.telemetry.recorder import CountingRecorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Keeping:
    """Keeps what it is handed; wants `most` batches."""

    def __init__(self, most: int = 1000) -> None:
        self.batches: list[Batch] = []
        self._most = most

    def took(self, batch: Batch) -> bool:
        self.batches.append(batch)
        return len(self.batches) < self._most

    def named(self) -> list[tuple[Lane, str]]:
        spans = [span for batch in self.batches for span in batch.spans]
        return [(span.lane, span.name) for span in sorted(spans, key=lambda span: span.begin_seconds)]


class Ticket:
    """A transfer that ended at this time, or fails."""

    def __init__(self, ended_seconds: float | None = None, error: BaseException | None = None) -> None:
        self.ended_seconds = ended_seconds
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return True


@pytest.fixture
def kept() -> Keeping:
    return Keeping()


@pytest.fixture
def followed(kept: Keeping) -> CountingRecorder:
    """A recorder whose spans go to `kept` when its follower finishes."""
    recorder = CountingRecorder()
    recorder.follower = Timeline(CpuAccelerator(), [kept], {})
    return recorder


def finish(recorder: CountingRecorder) -> None:
    assert isinstance(recorder.follower, Timeline)
    recorder.follower.finish()


def test_what_nobody_follows_keeps_nothing() -> None:
    recorder = CountingRecorder()
    recorder.span(Lane.STALL, "x", 0.0, 1.0)
    recorder.compute_begins("forward", "a")
    with recorder.on_stream(Lane.COPY_IN, None, "x", 3):
        recorder.in_flight(Lane.NVME_READ, "x", 0.0, Ticket(), 3).wait()
    assert vars(recorder.follower) == {}


def test_a_wait_is_a_stall_with_its_cause(followed: CountingRecorder, kept: Keeping) -> None:
    Waits(followed).until(Wait.STATE_READ, PassedEvent())
    finish(followed)
    assert kept.named() == [(Lane.STALL, "state read")]


def test_work_is_named_by_its_kind_and_by_whose_it_is(followed: CountingRecorder, kept: Keeping) -> None:
    with followed.working(Work.UPDATE_KERNEL, "layers.0/float32 #3"):
        pass
    with followed.working(Work.GRADIENT_NORM):
        pass
    finish(followed)
    assert kept.named() == [(Lane.CPU_UPDATE, "update kernel layers.0/float32 #3"), (Lane.CPU_UPDATE, "gradient norm")]


def test_a_transfer_lasts_until_its_bytes_had_moved_and_not_until_it_is_waited_for(
    followed: CountingRecorder, kept: Keeping
) -> None:
    followed.in_flight(Lane.NVME_WRITE, "w", 1.0, Ticket(2.5), 4096).wait()
    finish(followed)
    (span,) = kept.batches[0].spans
    assert (span.begin_seconds, span.end_seconds, span.nbytes, span.thread) == (1.0, 2.5, 4096, None)


def test_a_transfer_is_told_once_also_if_it_fails_but_not_while_it_goes_on(
    followed: CountingRecorder, kept: Keeping, tmp_path: Path
) -> None:
    failing = followed.in_flight(Lane.NVME_READ, "fails", 1.0, Ticket(error=TierIOError("read", tmp_path, 5)), 1)
    for _ in range(2):
        with pytest.raises(TierIOError):
            failing.wait()
    interrupted = followed.in_flight(Lane.NVME_READ, "goes on", 1.0, Ticket(error=KeyboardInterrupt()), 1)
    with pytest.raises(KeyboardInterrupt):
        interrupted.wait()
    finish(followed)
    assert kept.named() == [(Lane.NVME_READ, "fails")]


def test_compute_is_that_of_the_innermost_pass_and_pauses_for_waits(followed: CountingRecorder, kept: Keeping) -> None:
    followed.compute_begins("forward", "(root)")
    followed.compute_begins("forward", "layers.0")
    Waits(followed).until(Wait.PARAMETER_READ, PassedEvent())
    followed.compute_ends("layers.0")
    followed.compute_ends("(root)")
    followed.compute_ends("never begun")
    finish(followed)
    named = [name for _, name in kept.named()]
    assert named == [
        "forward (root)",
        "forward layers.0",
        "parameter read",
        "forward layers.0",
        "forward (root)",
    ]
    spans = sorted(kept.batches[0].spans, key=lambda span: span.begin_seconds)
    assert all(one.end_seconds <= other.begin_seconds for one, other in itertools.pairwise(spans))


def test_a_recomputed_forward_in_a_backward_ends_before_it(followed: CountingRecorder, kept: Keeping) -> None:
    followed.compute_begins("backward", "a")
    followed.compute_begins("recompute", "a")
    followed.compute_ends("a")
    followed.compute_ends("a")
    finish(followed)
    assert [name for _, name in kept.named()] == ["backward a", "recompute a", "backward a"]


@pytest.mark.parametrize("copies", list(Copies))
def test_a_copy_is_told_when_its_stream_has_passed_it(kept: Keeping, copies: Copies) -> None:
    accelerator = SimulatedAccelerator(copies)
    memory, source = accelerator.reserve(4096), populated_pages(4096)
    follower = Timeline(accelerator, [kept], {})
    memory.fill()
    with follower.on_stream(Lane.COPY_IN, accelerator.copy_in, "layers.0 #0", 4096):
        accelerator.copy(accelerator.copy_in, memory.tensor, source)
    before = time.perf_counter()
    follower.finish()
    (span,) = kept.batches[-1].spans
    assert (span.lane, span.name, span.nbytes, span.thread) == (Lane.COPY_IN, "layers.0 #0", 4096, None)
    assert span.begin_seconds <= span.end_seconds
    if copies is Copies.LATE:
        # Nobody waited for it before the end did: a step is never held up.
        assert span.end_seconds >= before
    accelerator.close()


def test_a_step_is_handed_on_when_it_ends(kept: Keeping, make_report: Callable[..., StepReport]) -> None:
    held = iter([10, 10, 30, 30])
    follower = Timeline(CpuAccelerator(), [kept], {"host": lambda: next(held)})
    follower.step_ended(make_report(1), time.perf_counter())
    follower.span(Lane.GATHER, "x", 1.0, 2.0)
    end = time.perf_counter()
    follower.step_ended(make_report(2), end)
    follower.finish()
    first, second, rest = kept.batches
    assert first.step is not None
    assert second.step is not None
    assert (first.step.report.step, second.step.report.step, rest.step) == (1, 2, None)
    assert (second.step.begin_seconds, second.step.end_seconds) == (first.step.end_seconds, end)
    assert [len(batch.spans) for batch in kept.batches] == [0, 1, 0]
    # Only what changed is told.
    assert [[level.nbytes for level in batch.levels] for batch in kept.batches] == [[10], [30], []]
    assert isinstance(first.levels[0], Level)


def test_a_long_batch_is_handed_on_without_a_step(kept: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_SPANS", 3)
    follower = Timeline(CpuAccelerator(), [kept], {})
    for number in range(7):
        follower.span(Lane.STALL, "x", number, number + 0.5)
    assert [len(batch.spans) for batch in kept.batches] == [3, 3]


def test_when_nobody_wants_more_the_run_is_told(make_report: Callable[..., StepReport]) -> None:
    told: list[str] = []
    short, long = Keeping(1), Keeping(2)
    follower = Timeline(CpuAccelerator(), [short, long], {}, lambda: told.append("done"))
    for step in range(1, 4):
        follower.step_ended(make_report(step), time.perf_counter())
    assert told == ["done"]
    assert (len(short.batches), len(long.batches)) == (1, 2)


def test_any_thread_may_report_and_ours_are_told_apart(followed: CountingRecorder, kept: Keeping) -> None:
    def report() -> None:
        for _ in range(500):
            now = time.perf_counter()
            followed.span(Lane.STALL, "x", now, now + 1e-9)

    names = ["zerooffload-update", "zerooffload-commit", "autograd", "main"]
    threads = [threading.Thread(target=report, name=name) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(followed.follower, Recorder)
    finish(followed)
    spans = [span for batch in kept.batches for span in batch.spans]
    assert {span.thread for span in spans} == {"", "zerooffload-update", "zerooffload-commit"}
    assert sum(span.thread == "zerooffload-update" for span in spans) == 500
