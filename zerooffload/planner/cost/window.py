"""Which units come to the device when, through a window that does not hold all of them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar


class Held(Protocol):
    """Something that takes room in the window."""

    @property
    def range_nbytes(self) -> int:
        """How much."""


H = TypeVar("H", bound=Held)


def choose_victims(
    candidates: Sequence[H], next_use: Callable[[H], float], need_nbytes: int, *, sooner_than: float = -inf
) -> list[H]:
    """Units to evict so that `need_nbytes` become free, farthest next use first (Belady 1966).

    Parameters
    ----------
    candidates : sequence
        Full units that nobody uses now.
    next_use : callable
        When a unit is used again, as a position in what is to come; infinite for never.
    sooner_than : float, optional
        Position of what the room is for: a unit that is needed before it is not given up.

    Returns
    -------
    list
        Empty if not enough could be given up.
    """
    victims, freed = [], 0
    for unit in sorted(candidates, key=next_use, reverse=True):
        if freed >= need_nbytes or next_use(unit) <= sooner_than:
            break
        victims.append(unit)
        freed += unit.range_nbytes
    return victims if freed >= need_nbytes else []


def first_uses(upcoming: Sequence[H]) -> Callable[[H], float]:
    """The position of each unit's first use among these; infinite for one without any."""
    positions = {id(unit): position for position, unit in reversed(list(enumerate(upcoming)))}
    return lambda unit: positions.get(id(unit), inf)


@dataclass(frozen=True)
class Arrival:
    """A unit that comes to the window.

    Attributes
    ----------
    unit : str
    visit : int
        The visit that needs it, or at whose beginning it is sent for, ahead of one that will.
    room_after : int
        The visit that was the last to use what made room; -1 if there was room.
    """

    unit: str
    visit: int
    room_after: int


@dataclass(frozen=True, eq=False)
class _Unit:
    name: str
    range_nbytes: int


def arrivals(
    passes: Sequence[Sequence[Sequence[str]]], range_nbytes: Mapping[str, int], window_nbytes: int
) -> list[Arrival]:
    """What comes to an empty window in a step, as the runtime's residency does it.

    Parameters
    ----------
    passes : Sequence[Sequence[Sequence[str]]]
        Forward, backward, forward, ... Of each its visits in order, of each the units that it needs. The first visit is
        the root's, whose units are in use until the pass ends.
    range_nbytes : Mapping[str, int]
        Of each unit, in the window; 0 for one that is always there.
    """
    return _Window(passes, range_nbytes, window_nbytes).run()


class _Window:
    def __init__(
        self, passes: Sequence[Sequence[Sequence[str]]], range_nbytes: Mapping[str, int], window_nbytes: int
    ) -> None:
        self._units = {name: _Unit(name, nbytes) for name, nbytes in range_nbytes.items()}
        self._passes = [[[self._units[name] for name in visit] for visit in visits] for visits in passes]
        self._free_nbytes = window_nbytes
        # In the order in which they came, with the visit that was the last to use each.
        self._full: dict[_Unit, int] = {}
        self._found: list[Arrival] = []

    def run(self) -> list[Arrival]:
        first = 0
        for number, visits in enumerate(self._passes):
            is_forward = number % 2 == 0
            follows = self._passes[number + 1] if is_forward and number + 1 < len(self._passes) else []
            self._foresee([unit for visit in [*visits, *follows] for unit in visit if unit.range_nbytes])
            for offset, visit in enumerate(visits):
                self._position += sum(1 for unit in visit if unit.range_nbytes)
                self._visit(first + offset, visit, visits[0])
            first += len(visits)
        return self._found

    def _foresee(self, upcoming: Sequence[_Unit]) -> None:
        """What follows is used in this order."""
        self._upcoming, self._position = upcoming, 0
        self._uses: dict[_Unit, list[int]] = {}
        for position, unit in enumerate(upcoming):
            self._uses.setdefault(unit, []).append(position)

    def _next_use(self, unit: _Unit) -> float:
        uses = self._uses.get(unit, ())
        number = bisect_left(uses, self._position)
        return uses[number] if number < len(uses) else inf

    def _visit(self, number: int, visit: Sequence[_Unit], pinned: Sequence[_Unit]) -> None:
        used = {*visit, *pinned}
        for unit in visit:
            if unit.range_nbytes and unit not in self._full:
                self._come(unit, number, self._victims(unit, used))
        for unit in used:
            if unit in self._full:
                self._full[unit] = number
        for position in range(self._position, len(self._upcoming)):
            unit = self._upcoming[position]
            if unit in self._full:
                continue
            victims = self._victims(unit, used, sooner_than=position)
            if unit.range_nbytes > self._free_nbytes and not victims:
                return
            self._come(unit, number, victims)

    def _victims(self, unit: _Unit, used: set[_Unit], *, sooner_than: float = -inf) -> list[_Unit]:
        missing = unit.range_nbytes - self._free_nbytes
        if missing <= 0:
            return []
        idle = [other for other in self._full if other not in used]
        return choose_victims(idle, self._next_use, missing, sooner_than=sooner_than)

    def _come(self, unit: _Unit, number: int, victims: Sequence[_Unit]) -> None:
        room_after = max((self._full.pop(victim) for victim in victims), default=-1)
        self._free_nbytes += sum(victim.range_nbytes for victim in victims) - unit.range_nbytes
        self._full[unit] = number
        self._found.append(Arrival(unit.name, number, room_after))
