from __future__ import annotations

import threading
from pathlib import Path

import pytest

from zerooffload.telemetry import Lane, Link, Recorder, StepReport, Work, process_peak_bytes, process_resident_bytes
from zerooffload.telemetry import process_memory as module
from zerooffload.telemetry import recorder as recorder_module
from zerooffload.telemetry.recorder import CountingRecorder, Counts

IDLE = {"nvme_read": 0.0, "nvme_written": 0.0, "drive": 0.0}


class Ended:
    """A transfer that ended at this time."""

    def __init__(self, ended_seconds: float) -> None:
        self.ended_seconds = ended_seconds

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


def test_counts_are_taken_once() -> None:
    recorder = CountingRecorder()
    recorder.moved(Link.NVME_READ, 5)
    recorder.moved(Link.NVME_READ, 6)
    recorder.waited("parameter read", 0.5)
    recorder.waited("parameter read", 0.25)
    recorder.worked(Work.UPDATE_KERNEL, 2.0)
    counts = recorder.take()
    assert counts.bytes_moved.pop("nvme_read") == 11
    assert set(counts.bytes_moved) == {link.value for link in Link} - {"nvme_read"}
    assert set(counts.bytes_moved.values()) == {0}
    assert counts.waits == {"parameter read": 0.75}
    assert counts.work == {"update kernel": 2.0}
    assert recorder.take() == Counts({link.value: 0 for link in Link}, busy=IDLE)


def test_a_drive_is_busy_while_any_transfer_is_under_way_in_whatever_order_they_are_waited_for() -> None:
    recorder = CountingRecorder()
    read, other_read, late_write = (
        recorder.in_flight(Lane.NVME_READ, "r", 0.0, Ended(2.0), 1),
        recorder.in_flight(Lane.NVME_READ, "s", 1.0, Ended(3.0), 1),
        recorder.in_flight(Lane.NVME_WRITE, "w", 2.5, Ended(4.5), 1),
    )
    for ticket in (other_read, read, read):
        ticket.wait()
    assert recorder.take().busy == {"nvme_read": 3.0, "nvme_written": 0.0, "drive": 3.0}
    recorder.in_flight(Lane.NVME_READ, "r", 4.0, Ended(5.0), 1).wait()
    late_write.wait()
    assert recorder.take().busy == {"nvme_read": 1.0, "nvme_written": 2.0, "drive": 2.5}
    assert recorder.take().busy == IDLE


def test_work_behind_the_training_thread_is_counted_apart() -> None:
    recorder = CountingRecorder()

    def work() -> None:
        with recorder.in_background():
            recorder.worked(Work.UPDATE_KERNEL, 2.0)
            recorder.waited("state read", 1.0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    recorder.worked(Work.GRADIENT_NORM, 0.5)
    counts = recorder.take()
    assert (counts.work, counts.hidden_work, counts.waits) == ({"gradient norm": 0.5}, {"update kernel": 2.0}, {})


def test_work_is_timed_also_when_it_raises() -> None:
    recorder = CountingRecorder()
    with pytest.raises(ZeroDivisionError), recorder.working(Work.GRADIENT_NORM):
        _ = 1 / 0
    assert list(recorder.take().work) == ["gradient norm"]


def test_a_second_counts_once_although_work_contains_waits_and_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now_seconds = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: next(now_seconds))
    recorder = CountingRecorder()
    with recorder.working(Work.GRADIENT_ACCUMULATION):
        recorder.waited("gradient write", 0.5)
        with recorder.working(Work.GRADIENT_NORM):
            recorder.waited("gradient read", 2.0)
    counts = recorder.take()
    assert counts.waits == {"gradient write": 0.5, "gradient read": 2.0}
    assert counts.work == {"gradient norm": 1.0, "gradient accumulation": 6.5}


def test_the_plain_recorder_takes_everything_and_keeps_nothing() -> None:
    recorder = Recorder()
    recorder.moved(Link.COPY_IN, 5)
    recorder.waited("x", 1.0)
    with recorder.working(Work.UPDATE_KERNEL):
        pass
    assert vars(recorder) == {}


def test_threads_may_report_at_the_same_time() -> None:
    recorder = CountingRecorder()

    def report() -> None:
        for _ in range(500):
            recorder.moved(Link.COPY_OUT, 1)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.take().bytes_moved["copy_out"] == 2000


def test_compute_is_what_waits_and_work_leave_of_a_step() -> None:
    report = StepReport(
        step=1,
        seconds=10.0,
        bytes_moved={},
        waits={"a": 1.0, "b": 2.0},
        work={"c": 3.0},
        tiers=(),
        baseline_bytes=0,
        process_peak_bytes=0,
    )
    assert report.compute_seconds == 4.0


def test_the_peak_is_at_least_what_is_resident() -> None:
    resident = process_resident_bytes()
    assert process_peak_bytes() >= resident > 0


def test_where_the_kernel_tells_no_peak_the_present_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(module, "process_resident_bytes", lambda: 17)
    assert process_peak_bytes() == 17
