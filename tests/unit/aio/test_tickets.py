"""The watchdog of waits."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerooffload import TierIOError
from zerooffload.accelerator.pages import populated_pages
from zerooffload.aio import tickets
from zerooffload.aio.tickets import Operation, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerooffload.aio import Engine, OpenFile

OPERATION = Operation("read", Path("/drive/states.bin"), 8192, 4096)


class Slow(Ticket):
    """Ends at this time of a clock that moves only while one waits."""

    def __init__(self, end_seconds: float, failure: TierIOError | None = None) -> None:
        super().__init__(OPERATION)
        self.now_seconds = 1000.0
        self._end_seconds = self.now_seconds + end_seconds
        self._fails_with = failure

    def _ends_within(self, seconds: float) -> bool:
        if self.now_seconds + seconds < self._end_seconds:
            self.now_seconds += seconds
            return False
        self.now_seconds = max(self.now_seconds, self._end_seconds)
        if self._fails_with is not None:
            raise self._fails_with
        return True

    def _has_ended(self) -> bool:
        return self.now_seconds >= self._end_seconds


def warnings_of(ticket: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    monkeypatch.setattr(tickets.time, "monotonic", lambda: ticket.now_seconds)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        ticket.wait()
    return [record.getMessage() for record in caplog.records]


def test_a_wait_of_ordinary_length_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(Slow(29.0), monkeypatch, caplog) == []


def test_a_long_wait_is_told_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    what = "the read of 4096 bytes at offset 8192 of /drive/states.bin has taken"
    assert warnings_of(Slow(200.0), monkeypatch, caplog) == [
        f"{what} 30.00 s so far",
        f"{what} 1 min 00 s so far",
        f"{what} 2 min 00 s so far",
    ]


def test_its_patience_can_be_set(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Ticket, "slow_after_seconds", 1.0)
    assert len(warnings_of(Slow(3.5), monkeypatch, caplog)) == 2


def test_a_flush_has_no_offset() -> None:
    assert str(Operation("flush", Path("/drive/states.bin"))) == "flush of /drive/states.bin"


def test_a_failure_is_raised_each_time() -> None:
    ticket = Slow(1.0, OPERATION.failure(errno.EIO, 512))
    for _ in range(2):
        with pytest.raises(TierIOError) as caught:
            ticket.wait()
        assert (caught.value.offset_bytes, caught.value.transferred_bytes) == (8192, 512)
    assert ticket.done()


def test_who_is_interrupted_can_wait_again() -> None:
    class Interrupted(Slow):
        def _ends_within(self, seconds: float) -> bool:
            if self.now_seconds == 1000.0:
                self.now_seconds += 1.0
                raise KeyboardInterrupt
            return super()._ends_within(seconds)

    ticket = Interrupted(5.0)
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert not ticket.done()
    ticket.wait()
    assert ticket.done()


def test_every_engine_can_be_asked_for_a_time(engine: Engine, new_file: Callable[[], OpenFile]) -> None:
    ticket = engine.submit_write(new_file(), 0, populated_pages(1 << 20))
    while not ticket._ends_within(0.0):
        pass
    # What has ended is forgotten by the engine; the ticket keeps it.
    ticket._is_over = True
    ticket.wait()
