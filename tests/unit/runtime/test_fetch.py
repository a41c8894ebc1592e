"""Fetches that wait for updates, with parts that only keep count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerooffload.accelerator.cpu import PassedEvent
from zerooffload.errors import InternalError
from zerooffload.runtime.fetch import Fetcher
from zerooffload.runtime.home_reads import HomeReads
from zerooffload.runtime.snapshots import Snapshots
from zerooffload.sharding.collectives import SingleRank
from zerooffload.telemetry import Recorder, Waits


class Updates:
    """Homes of none, then of all. `left` is what they have left in memory, by part, once they are computed."""

    are_home = False
    are_computed = False

    def __init__(self) -> None:
        self.left: dict[int, torch.Tensor] = {}

    def has_parameters(self, _: object) -> bool:
        return self.are_home

    def wait_for_parameters(self, _: object) -> None:
        self.are_home = self.are_computed = True

    def wait_for_steps(self, _: object) -> None:
        self.are_computed = True

    def lends(self, part: object, chunks: range | list[int]) -> bool:
        return self.are_computed and (id(part) in self.left or not chunks)

    def lend(self, part: object, _chunk: int, use: Callable[[torch.Tensor], object]) -> bool:
        if not self.are_computed or id(part) not in self.left:
            return False
        use(self.left[id(part)])
        return True

    def giving_way(self) -> AbstractContextManager[None]:
        return nullcontext()


class Device:
    """One with memory of its own."""

    shares_host_memory = False
    copy_in = SimpleNamespace(wait=lambda _: None)
    compute = copy_in


class Home:
    """Of one record on a file."""

    name = "home"
    layout = SimpleNamespace(chunks=range(1), file_nbytes=lambda _: 8, record_nbytes=lambda _: 8)

    def __init__(self) -> None:
        self.num_reads = self.num_writes = 0
        self.failure: Exception | None = None
        self.ticket: Any = PassedEvent()

    def view(self, *_: object) -> None:
        return None

    def version(self, _: int) -> int:
        return self.num_writes

    def read(self, _chunk: int, target: torch.Tensor) -> Any:
        if self.failure is not None:
            raise self.failure
        self.num_reads += 1
        target.fill_(self.num_writes)
        return self.ticket


class Ring:
    """Gives slots out and takes them back."""

    is_ready = True

    def __init__(self, num_slots: int = 8) -> None:
        self.num_free = num_slots

    def has_room(self, _: int) -> bool:
        return self.num_free > 0

    def acquire(self, _: object) -> Any:
        assert self.num_free
        self.num_free -= 1
        return SimpleNamespace(take=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))

    def release(self, *_: object) -> None:
        self.num_free += 1


class Arrivals:
    """What other ranks take home is there when it is said to be, or waited for."""

    are_there = True

    def of(self, _: object) -> Any:
        return SimpleNamespace(done=lambda: self.are_there, wait=lambda: setattr(self, "are_there", True))


def far_unit() -> Any:
    memory = SimpleNamespace(tensor=torch.zeros(8, dtype=torch.uint8), fill=lambda: None)
    part = SimpleNamespace(
        home=Home(),
        range=memory,
        current_chunks=range(1),
        copies_are_current=True,
        place_of=lambda _, tensor: tensor,
    )
    return SimpleNamespace(moving_parts=[part], parts=[part])


def copy_at_once(target: torch.Tensor, source: torch.Tensor, _name: str) -> PassedEvent:
    target.copy_(source)
    return PassedEvent()


def new_fetcher(updates: Updates, ring: Ring, arrivals: Arrivals | None = None) -> Fetcher:
    transfers = SimpleNamespace(
        copy_in=copy_at_once,
        to_device=lambda target, source, _used, _reuse, *, name: copy_at_once(target, source, name),
    )
    waits = Waits(Recorder())
    return Fetcher(
        Device(),
        transfers,
        ring,
        waits,
        updates,
        home_reads=HomeReads(waits, SingleRank(), Snapshots(waits)),
        arrivals=arrivals or Arrivals(),  # type: ignore[arg-type]
        reads_device=False,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("is_current", [True, False])
def test_what_other_ranks_take_home_is_read_when_it_is_there(*, is_current: bool) -> None:
    """But for parameters that are gathered again, of which only what this rank updates is read."""
    updates, arrivals = Updates(), Arrivals()
    updates.are_home, arrivals.are_there = True, False
    fetcher = new_fetcher(updates, Ring(), arrivals)
    unit = far_unit()
    (part,) = unit.parts
    part.copies_are_current = is_current
    fetch = fetcher.start(unit, PassedEvent())
    assert part.home.num_reads == (0 if is_current else 1)
    fetcher.finish(fetch)
    assert part.home.num_reads == 1
    assert arrivals.are_there == is_current


def test_fetches_whose_updates_come_home_together_begin_once_each() -> None:
    updates = Updates()
    fetcher = new_fetcher(updates, Ring())
    units = [far_unit() for _ in range(3)]
    fetches = [fetcher.start(unit, PassedEvent()) for unit in units]
    assert [unit.parts[0].home.num_reads for unit in units] == [0, 0, 0]
    updates.are_home = True
    for fetch in fetches:
        fetcher.finish(fetch)
    assert [unit.parts[0].home.num_reads for unit in units] == [1, 1, 1]


def test_the_first_of_several_that_is_waited_for_begins_once() -> None:
    fetcher = new_fetcher(Updates(), Ring())
    units = [far_unit() for _ in range(3)]
    first, *_ = [fetcher.start(unit, PassedEvent()) for unit in units]
    fetcher.finish(first)
    fetcher.advance()
    assert [unit.parts[0].home.num_reads for unit in units] == [1, 1, 1]


class TestWhatUpdatesLeft:
    """Parameters that the update has left in memory are copied from there."""

    def test_as_soon_as_they_are_computed(self) -> None:
        updates, unit = Updates(), far_unit()
        updates.left[id(unit.parts[0])] = torch.full((8,), 5, dtype=torch.uint8)
        fetcher = new_fetcher(updates, Ring())
        fetch = fetcher.start(unit, PassedEvent())
        assert unit.parts[0].range.tensor[0] == 0
        updates.are_computed = True
        fetcher.advance()
        assert unit.parts[0].range.tensor[0] == 5
        assert not updates.are_home
        fetcher.finish(fetch)
        assert unit.parts[0].home.num_reads == 0
        assert fetch.last_copy is not None

    def test_others_are_read_when_they_are_home(self) -> None:
        updates, units = Updates(), [far_unit(), far_unit()]
        updates.left[id(units[0].parts[0])] = torch.full((8,), 5, dtype=torch.uint8)
        fetcher = new_fetcher(updates, Ring())
        fetches = [fetcher.start(unit, PassedEvent()) for unit in units]
        updates.are_computed = True
        fetcher.advance()
        assert [unit.parts[0].home.num_reads for unit in units] == [0, 0]
        fetcher.finish(fetches[1])
        assert updates.are_home
        assert [unit.parts[0].home.num_reads for unit in units] == [0, 1]

    def test_they_are_not_read_ahead(self) -> None:
        updates, unit = Updates(), far_unit()
        updates.left[id(unit.parts[0])] = torch.zeros(8, dtype=torch.uint8)
        updates.are_home = updates.are_computed = True
        fetcher = new_fetcher(updates, Ring())
        fetcher.read_ahead([unit])
        assert unit.parts[0].home.num_reads == 0

    def test_what_was_read_ahead_is_used(self) -> None:
        updates, unit, ring = Updates(), far_unit(), Ring(num_slots=2)
        updates.are_home = updates.are_computed = True
        fetcher = new_fetcher(updates, ring)
        fetcher.read_ahead([unit])
        updates.left[id(unit.parts[0])] = torch.zeros(8, dtype=torch.uint8)
        fetcher.finish(fetcher.start(unit, PassedEvent()))
        assert unit.parts[0].home.num_reads == 1
        assert ring.num_free == 2


class TestReadAhead:
    """Units that the device has no room for yet."""

    updates: Updates
    ring: Ring
    fetcher: Fetcher

    def setup_method(self) -> None:
        self.updates = Updates()
        self.updates.are_home = True
        self.ring = Ring(num_slots=2)
        self.fetcher = new_fetcher(self.updates, self.ring)

    def reads(self, *units: Any) -> list[int]:
        return [unit.parts[0].home.num_reads for unit in units]

    def fetch(self, unit: Any) -> int:
        """The value that arrives."""
        self.fetcher.finish(self.fetcher.start(unit, PassedEvent()))
        return int(unit.parts[0].range.tensor[0])

    def test_as_far_as_slots_reach_and_once(self) -> None:
        units = [far_unit() for _ in range(3)]
        self.fetcher.read_ahead(units)
        self.fetcher.read_ahead(units)
        assert self.reads(*units) == [1, 1, 0]
        for unit in units:
            self.fetch(unit)
        assert self.reads(*units) == [1, 1, 1]
        assert self.ring.num_free == 2

    def test_what_was_written_since_is_read_again(self) -> None:
        unit = far_unit()
        self.fetcher.read_ahead([unit])
        unit.parts[0].home.num_writes = 7
        assert self.fetch(unit) == 7
        assert self.reads(unit) == [2]
        assert self.ring.num_free == 2

    def test_a_surprise_takes_the_slots_of_what_is_needed_last(self) -> None:
        first, last, surprise = (far_unit() for _ in range(3))
        self.fetcher.read_ahead([first, last])
        self.fetch(surprise)
        self.fetch(first)
        assert self.reads(first, last, surprise) == [1, 1, 1]
        self.fetch(last)
        assert self.reads(last) == [2]

    def test_nothing_that_is_being_updated(self) -> None:
        self.updates.are_home = False
        unit = far_unit()
        self.fetcher.read_ahead([unit])
        assert self.reads(unit) == [0]

    def test_nothing_that_would_have_to_wait(self) -> None:
        unit = far_unit()
        self.ring.is_ready = False
        self.fetcher.read_ahead([unit])
        assert self.reads(unit) == [0]

    def test_without_slots_no_unit_is_looked_at(self) -> None:
        self.ring.num_free = 0
        units = [far_unit() for _ in range(3)]
        for unit in units:
            unit.parts[0].home.view = lambda *_: pytest.fail("looked at")
        self.fetcher.read_ahead(units)

    def test_nothing_while_a_fetch_waits_for_slots(self) -> None:
        fetched, ahead = [far_unit() for _ in range(3)], far_unit()
        for unit in fetched:
            unit.parts[0].home.ticket = SimpleNamespace(done=lambda: False)
            self.fetcher.start(unit, PassedEvent())
        # One came free that the fetch has not seen yet.
        self.ring.num_free = 1
        self.fetcher.read_ahead([ahead])
        assert self.reads(ahead) == [0]

    def test_a_read_that_fails_is_tried_again_by_who_needs_it(self) -> None:
        unit = far_unit()
        unit.parts[0].home.failure = InternalError("of the drive")
        self.fetcher.read_ahead([unit])
        assert self.ring.num_free == 2
        with pytest.raises(InternalError, match="of the drive"):
            self.fetcher.start(unit, PassedEvent())

    def test_dropped_it_holds_no_slot(self) -> None:
        self.fetcher.read_ahead([far_unit()])
        self.fetcher.drop_read_ahead()
        assert self.ring.num_free == 2
