"""Every wait of a run, by name.

[Note: waits have names]
Each place where one party must be behind another is a member of `Wait` and goes through `Waits`. That names every stall
in the reports, and lets a test take out one wait at a time and see the numbers go wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from zerooffload.accelerator import Event, Stream
from zerooffload.telemetry.recorder import Recorder
from zerooffload.telemetry.spans import Lane


class Wait(StrEnum):
    """What is waited for, and by whom."""

    PARAMETER_READ = "parameter read"
    """Compute or a copy, until a parameter's bytes are read from its home."""
    PARAMETER_COPY = "parameter copy"
    """Compute, until a parameter's copy to the device is done."""
    PARAMETER_GATHERED = "parameter gathered"
    """A copy from the device, until the ranks' parameters have been joined there."""
    PARAMETER_WRITE = "parameter write"
    """Whoever reuses a gathered parameter's memory or reads it from its home, until it is there."""
    PARAMETER_REUSE = "parameter reuse"
    """Whoever changes parameters at home in host memory, until copies of them to the device are done."""
    RANGE_REFILL = "range refill"
    """A copy to the device, until compute is done with what the memory held before."""
    STAGING_REUSE = "staging reuse"
    """Whoever fills a staging slot, until its last content has left it."""
    GRADIENT_COMPUTED = "gradient computed"
    """A copy from the device, until compute has written its source."""
    GRADIENT_COPY = "gradient copy"
    """The host, until a gradient's copy from the device is done."""
    GRADIENT_LANDING = "gradient landing"
    """Whoever uses gradients, until those on their way from the device are joined with their homes."""
    GRADIENT_READ = "gradient read"
    """Accumulation, until the gradient held on a file is read."""
    GRADIENT_WRITE = "gradient write"
    """Whoever reads a gradient or writes it again, until its write is done."""
    GRADIENT_MEMORY = "gradient memory"
    """Whoever collects gradients, until earlier ones have left the memory for it."""
    STATE_READ = "state read"
    """The update, until a chunk's states are staged."""
    STATE_COPY = "state copy"
    """The update or compute, until a chunk's copy between host and device is done."""
    STATE_WRITE = "state write"
    """Whoever reads an updated state, until it has reached its home."""
    ACTIVATION_WRITE = "activation write"
    """Whoever reads a page of a block's input, or writes another to its place, until it has reached its home."""
    ACTIVATION_READ = "activation read"
    """A copy to where compute wants a block's input, until a page of it is read from its home."""
    ACTIVATION_COPY = "activation copy"
    """Compute, until a block's input is copied to the device; who reuses its memory there, until it is copied away."""
    ACTIVATION_REUSE = "activation reuse"
    """A copy to the device, until compute is done with what its memory held before."""
    UPDATE = "update"
    """Whoever uses a unit, until its hidden update is done."""
    COMMIT = "commit"
    """Whoever writes to a slot again, until the step before is committed on every rank."""
    SNAPSHOT = "snapshot"
    """Whoever changes a state, until a save that goes on beside the training has read it."""


class Waitable(Protocol):
    """Something in flight that can be waited for: an event, an I/O ticket."""

    def wait(self) -> None:
        """Block until done; raise what went wrong."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""


class Waits:
    """Performs waits and reports how long they took."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def until(self, cause: Wait, waitable: Waitable) -> None:
        """Block the calling thread."""
        begin = time.perf_counter()
        waitable.wait()
        end = time.perf_counter()
        self._recorder.waited(cause.value, end - begin)
        self._recorder.span(Lane.STALL, cause.value, begin, end)

    def order(self, cause: Wait, stream: Stream, event: Event) -> None:  # noqa: ARG002 - for who takes waits out
        """Put later work of `stream` behind `event`, without blocking the calling thread."""
        stream.wait(event)


def wait_in_turn(waits: Waits, cause: Wait, waitables: list[Waitable]) -> None:
    """Wait for each and take it from the list. One that failed is told once, to the caller; those behind it stay."""
    while waitables:
        try:
            waits.until(cause, waitables[0])
        except KeyboardInterrupt:
            raise
        except BaseException:
            del waitables[0]
            raise
        del waitables[0]


def wait_for_all(waits: Waits, cause: Wait, waitables: Iterable[Waitable]) -> None:
    """Wait for each, also when one fails: memory may be given back only when nothing is in flight to it.

    Raises
    ------
    BaseException
        The first failure, once all are done.
    """
    failure: BaseException | None = None
    for waitable in waitables:
        try:
            waits.until(cause, waitable)
        except KeyboardInterrupt as interrupt:
            # The transfer goes on: it is waited for before the interruption is.
            failure = failure or interrupt
            try:
                waits.until(cause, waitable)
            except Exception as error:  # noqa: BLE001 - the interruption is what is raised
                failure.add_note(f"also: {error}")
        except BaseException as error:  # noqa: BLE001 - raised below
            failure = failure or error
    if failure is not None:
        raise failure
