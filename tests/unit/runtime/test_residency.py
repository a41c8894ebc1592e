"""What is full, with a fetcher that only keeps count."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload import BudgetError, ConfigError, InternalError, TierIOError
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.planner.cost.window import choose_victims, first_uses
from zerooffload.runtime.residency import Residency
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.collectives import SingleRank
from zerooffload.sharding.state import ShardState
from zerooffload.sharding.unit import Unit
from zerooffload.telemetry import Recorder, Waits


class FakeRange:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.filled = False

    def fill(self) -> None:
        self.filled = True

    def empty(self) -> None:
        self.filled = False


class FakeFlat:
    shown = "away"
    is_watched = True

    def __init__(self, nbytes: int) -> None:
        self.layout = SimpleNamespace(elements=lambda memory: memory[:nbytes], name="flat")

    def show_full(self) -> None:
        self.shown = "full"

    def check_untouched(self) -> None:
        pass

    def show_away(self) -> None:
        self.shown = "away"

    def let_be_used(self) -> None:
        self.is_watched = False

    def watch_for_use(self) -> None:
        self.is_watched = True


@dataclass(eq=False)
class FakePart:
    range: FakeRange | None
    flat: FakeFlat
    is_whole_at_home: bool = True
    copies_are_current: bool = True


def make_unit(name: str, nbytes: int) -> Any:
    """A unit that takes `nbytes` while full; 0 for one whose home the device can use."""
    part = FakePart(FakeRange(nbytes) if nbytes else None, FakeFlat(nbytes))
    return Unit(name, [part])  # type: ignore[list-item]


class FakeFetcher:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: set[str] = set()
        self.ahead: list[str] = []

    def cancel(self, _fetch: object) -> None:
        pass

    def start(self, unit: Unit, _after: object) -> Any:
        self.log.append(f"start {unit.name}")
        unit.parts[0].range.fill()  # type: ignore[union-attr]
        return SimpleNamespace(unit=unit)

    def read_ahead(self, units: Any) -> None:
        self.ahead = [unit.name for unit in units]

    def drop_read_ahead(self) -> None:
        self.ahead = []

    def finish(self, fetch: Any) -> None:
        self.log.append(f"finish {fetch.unit.name}")
        if fetch.unit.name in self.fails:
            raise TierIOError("read", "/disk", 5)

    def advance(self) -> None:
        pass

    def wait_for_copies(self, unit: Unit) -> None:
        pass


@pytest.fixture
def fetcher() -> FakeFetcher:
    return FakeFetcher()


@pytest.fixture
def residency(fetcher: FakeFetcher) -> Residency:
    """A window of 30 bytes."""
    updates = UpdateQueue(None, Waits(Recorder()))  # type: ignore[arg-type] - nothing is updated here
    return Residency(30, fetcher, SingleRank(), CpuAccelerator(), updates)  # type: ignore[arg-type]


@pytest.fixture
def units() -> list[Any]:
    return [make_unit(name, 10) for name in "abcde"]


def full(units: list[Any]) -> str:
    return "".join(unit.name for unit in units if unit.state.current is ShardState.FULL)


def test_what_is_required_is_full_and_shown(residency: Residency, units: list[Any], fetcher: FakeFetcher) -> None:
    residency.require(units[:2])
    assert full(units) == "ab"
    assert fetcher.log == ["start a", "start b", "finish a", "finish b"]
    assert [unit.parts[0].flat.shown for unit in units[:3]] == ["full", "full", "away"]


def test_what_is_full_is_not_fetched_again(residency: Residency, units: list[Any], fetcher: FakeFetcher) -> None:
    for _ in range(3):
        residency.require(units[:1])
        residency.release(units[:1])
    assert fetcher.log == ["start a", "finish a"]


def test_a_unit_usable_at_home_takes_nothing(residency: Residency, fetcher: FakeFetcher) -> None:
    at_home = make_unit("home", 0)
    residency.require([at_home])
    residency.prefetch([at_home])
    residency.release([at_home])
    assert fetcher.log == []
    assert at_home.state.current is ShardState.AT_HOME


def test_room_is_made_by_what_is_needed_last(residency: Residency, units: list[Any]) -> None:
    a, b, c, d, _ = units
    for unit in (a, b, c):
        residency.require([unit])
        residency.release([unit])
    residency.require([d], upcoming=[a, c, b])
    assert full(units) == "acd"
    assert (b.state.current, b.parts[0].flat.shown, b.parts[0].range.filled) == (ShardState.AT_HOME, "away", False)


def test_what_is_in_use_is_never_evicted_and_the_refusal_names_it(residency: Residency, units: list[Any]) -> None:
    residency.require(units[:3])
    residency.require(units[:1])
    residency.release(units[:1])
    with pytest.raises(BudgetError) as caught:
        residency.require(units[3:4])
    for word in ("unit d", "10 B", "30 B", "a, b, c", "by 10 bytes"):
        assert word in str(caught.value)
    residency.release(units[3:4])
    assert full(units) == "abc"


def test_prefetch_goes_as_far_as_the_window_and_is_finished_when_needed(
    residency: Residency, units: list[Any], fetcher: FakeFetcher
) -> None:
    residency.prefetch(units)
    assert fetcher.log == ["start a", "start b", "start c"]
    assert fetcher.ahead == ["d", "e"]
    assert full(units) == ""
    residency.require(units[1:2])
    assert fetcher.log[3:] == ["finish b"]
    residency.settle()
    assert fetcher.ahead == []


def test_prefetch_gives_up_only_what_is_needed_later(
    residency: Residency, units: list[Any], fetcher: FakeFetcher
) -> None:
    a, b, c, d, e = units
    for unit in (a, b, c):
        residency.require([unit])
        residency.release([unit])
    residency.prefetch([a, b, c, d])
    assert full(units) == "abc"
    residency.prefetch([d, a, e])
    assert "c" not in full(units) or "b" not in full(units)
    assert "a" in full(units)
    assert d.state.current is ShardState.FETCHING
    assert fetcher.log.count("start d") == 1


def test_a_wrong_guess_makes_room(residency: Residency, units: list[Any], fetcher: FakeFetcher) -> None:
    residency.prefetch(units[:3])
    residency.require(units[3:4])
    assert set(fetcher.log) >= {"finish a", "finish b", "finish c", "start d", "finish d"}
    assert "d" in full(units)


def test_a_fetch_that_fails_leaves_the_unit_at_home_and_can_be_tried_again(
    residency: Residency, units: list[Any], fetcher: FakeFetcher
) -> None:
    fetcher.fails = {"a"}
    with pytest.raises(TierIOError):
        residency.require(units[:1])
    residency.release(units[:1])
    assert units[0].state.current is ShardState.AT_HOME
    assert not units[0].parts[0].range.filled
    fetcher.fails = set()
    residency.require(units[:3])
    assert full(units) == "abc"


def test_a_release_too_many_is_a_bug_that_is_told(residency: Residency, units: list[Any]) -> None:
    residency.require(units[:1])
    residency.release(units[:1])
    with pytest.raises(InternalError, match="unit a was released more often"):
        residency.release(units[:1])


def test_sending_home_empties_the_window_unless_something_is_in_use(residency: Residency, units: list[Any]) -> None:
    residency.require(units[:1])
    residency.release(units[:1])
    residency.prefetch(units[1:2])
    residency.send_home()
    assert [unit.state.current for unit in units] == [ShardState.AT_HOME] * 5
    residency.require(units[:1])
    with pytest.raises((ConfigError, InternalError), match="unit a is in use"):
        residency.send_home()


def test_settling_finishes_every_fetch(residency: Residency, units: list[Any]) -> None:
    residency.prefetch(units[:2])
    residency.settle()
    assert full(units) == "ab"


@st.composite
def evictions(draw: st.DrawFn) -> tuple[list[Any], list[Any], int]:
    units = [make_unit(str(number), draw(st.integers(1, 5))) for number in range(draw(st.integers(0, 5)))]
    stranger = make_unit("stranger", 3)
    upcoming = draw(st.lists(st.sampled_from([*units, stranger]), max_size=8))
    return units, upcoming, draw(st.integers(1, 12))


def next_use(unit: Any, upcoming: list[Any]) -> float:
    return upcoming.index(unit) if unit in upcoming else inf


@given(evictions())
def test_victims_are_those_of_farthest_next_use_and_no_more_than_needed(case: tuple[list[Any], list[Any], int]) -> None:
    candidates, upcoming, need = case
    victims = choose_victims(candidates, first_uses(upcoming), need)
    sizes = {unit: unit.range_nbytes for unit in candidates}
    if sum(sizes.values()) < need:
        assert victims == []
        return
    assert sum(sizes[unit] for unit in victims) >= need > sum(sizes[unit] for unit in victims[:-1])
    # Brute force: no other choice that is enough keeps what is needed sooner.
    soonest = min(next_use(unit, upcoming) for unit in victims)
    for count in range(1, len(candidates) + 1):
        for others in combinations(candidates, count):
            if sum(sizes[unit] for unit in others) >= need:
                assert min(next_use(unit, upcoming) for unit in others) <= soonest


@given(evictions(), st.integers(0, 8))
def test_nothing_that_is_needed_before_the_newcomer_is_given_up(
    case: tuple[list[Any], list[Any], int], position: int
) -> None:
    candidates, upcoming, need = case
    victims = choose_victims(candidates, first_uses(upcoming), need, sooner_than=position)
    assert all(next_use(unit, upcoming) > position for unit in victims)
    later = [unit for unit in candidates if next_use(unit, upcoming) > position]
    assert bool(victims) == (sum(unit.range_nbytes for unit in later) >= need)
