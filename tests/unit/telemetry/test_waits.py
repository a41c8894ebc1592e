from __future__ import annotations

import pytest

from zerooffload.accelerator.cpu import CpuAccelerator, PassedEvent
from zerooffload.telemetry import Wait, Waits, wait_for_all
from zerooffload.telemetry.recorder import CountingRecorder


class Ticket:
    """Something in flight that fails with each of `errors` first, one a wait."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.num_waits = 0
        self.arrived = False

    def wait(self) -> None:
        self.num_waits += 1
        if self.errors:
            raise self.errors.pop(0)
        self.arrived = True

    def done(self) -> bool:
        return self.arrived


@pytest.fixture
def recorder() -> CountingRecorder:
    return CountingRecorder()


@pytest.fixture
def waits(recorder: CountingRecorder) -> Waits:
    return Waits(recorder)


def test_a_wait_is_reported_under_its_name(waits: Waits, recorder: CountingRecorder) -> None:
    waits.until(Wait.STATE_READ, PassedEvent())
    assert list(recorder.take().waits) == ["state read"]


def test_ordering_a_stream_passes_the_event_on(waits: Waits) -> None:
    ticket = Ticket()
    waits.order(Wait.STATE_COPY, CpuAccelerator().compute, ticket)
    assert ticket.arrived


def test_all_are_waited_for_also_when_one_fails_and_the_first_failure_is_raised(waits: Waits) -> None:
    tickets = [Ticket(), Ticket(ValueError("first")), Ticket(ValueError("second")), Ticket()]
    with pytest.raises(ValueError, match="first"):
        wait_for_all(waits, Wait.PARAMETER_READ, tickets)
    assert [ticket.num_waits for ticket in tickets] == [1, 1, 1, 1]


def test_an_interrupted_wait_is_taken_up_again(waits: Waits) -> None:
    interrupted = Ticket(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        wait_for_all(waits, Wait.PARAMETER_READ, [interrupted])
    assert interrupted.arrived
