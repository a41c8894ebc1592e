"""What ranks take home together, counted in memory that they share, with copies that are done when the test says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.errors import RankError
from zerooffload.runtime.arrivals import Arrivals
from zerooffload.runtime.resources import Parts
from zerooffload.runtime.shared_homes import Member, Sharers
from zerooffload.telemetry import Recorder, Waits


@dataclass
class Copy:
    """Under way until it is ended."""

    failure: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.over.wait(10)
        if self.failure is not None:
            raise self.failure

    def done(self) -> bool:
        return self.over.is_set()


class Part:
    """Of a unit."""


def two_ranks(pid: int | None = None) -> list[Any]:
    """What each has of one copy; the second's process may be another."""
    counters = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    members = (Member(4, os.getpid()), Member(6, pid or os.getpid()))
    parts = Parts(CpuAccelerator(), SimpleNamespace(), Waits(Recorder()), Recorder())  # type: ignore[arg-type]
    return [Arrivals(counters, Sharers((0, 2), position, members), parts) for position in range(2)]


def test_what_all_have_taken_home_is_there() -> None:
    first, second = two_ranks()
    part, copies = Part(), [Copy(), Copy()]
    assert first.of(part) is None
    for arrivals in (first, second):
        arrivals.begun(part, [copies[arrivals is second]])
    assert not first.of(part).done()
    assert not second.of(part).done()
    copies[1].over.set()
    # Its own copy is a matter of the rank that waits for it: no rank waits for its own count.
    first.of(part).wait()
    assert not second.of(part).done()
    copies[0].over.set()
    second.of(part).wait()


def test_flats_are_told_apart_by_their_order() -> None:
    first, second = two_ranks()
    parts = [Part(), Part()]
    copies = {part: Copy() for part in parts}
    for part in parts:
        first.begun(part, [])
        second.begun(part, [copies[part]])
    copies[parts[0]].over.set()
    first.of(parts[0]).wait()
    assert not first.of(parts[1]).done()
    # Gathered again.
    first.begun(parts[0], [])
    assert not first.of(parts[0]).done()
    copies[parts[1]].over.set()
    second.begun(parts[0], [])
    first.of(parts[0]).wait()
    second.of(parts[0]).wait()


def test_who_has_nothing_to_send_counts_too() -> None:
    first, second = two_ranks()
    part = Part()
    for arrivals in (first, second):
        arrivals.begun(part, [])
    first.of(part).wait()
    second.of(part).wait()


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    first, second = two_ranks()
    parts = [Part(), Part()]
    for part in parts:
        first.begun(part, [])
    second.begun(parts[0], [])
    second.close()
    first.of(parts[0]).wait()
    with pytest.raises(RankError, match="rank 6 is gone"):
        first.of(parts[1]).wait()


def test_a_rank_that_has_died_is_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    first, _ = two_ranks(process.pid)
    part = Part()
    first.begun(part, [])
    with pytest.raises(RankError, match="rank 6 is gone"):
        first.of(part).wait()


def test_a_copy_that_fails_is_not_counted() -> None:
    first, second = two_ranks()
    part, copy = Part(), Copy(ValueError("lost"))
    first.begun(part, [])
    second.begun(part, [copy])
    copy.over.set()
    with pytest.raises(RankError, match="rank 6"):
        first.of(part).wait()
    with pytest.raises(ValueError, match="lost"):
        second.begun(part, [])


def test_the_end_waits_for_what_is_under_way() -> None:
    first, second = two_ranks()
    part, copy = Part(), Copy()
    second.begun(part, [copy])
    first.begun(part, [])
    timer = threading.Timer(0.0, copy.over.set)
    timer.start()
    second.close()
    assert first.of(part).done()
    timer.join()
