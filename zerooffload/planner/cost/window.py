"""Which units come to the device when, through a window that does not hold all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Held(Protocol):
    """Something that takes room in the window."""

    @property
    def range_nbytes(self) -> int:
        """How much."""


H = TypeVar("H", bound=Held)


def choose_victims(
    candidates: Sequence[H], upcoming: Sequence[H], need_nbytes: int, *, sooner_than: int | None = None
) -> list[H]:
    """Units to evict so that `need_nbytes` become free, farthest next use first (Belady 1966).

    Parameters
    ----------
    candidates : sequence
        Full units that nobody uses now.
    sooner_than : int, optional
        Position in `upcoming` of what the room is for: a unit that is needed before it is not given up.

    Returns
    -------
    list
        Empty if not enough could be given up.
    """
    next_use = {id(unit): position for position, unit in reversed(list(enumerate(upcoming)))}
    never = len(upcoming)
    victims, freed = [], 0
    for unit in sorted(candidates, key=lambda unit: -next_use.get(id(unit), never)):
        if freed >= need_nbytes:
            break
        if sooner_than is not None and next_use.get(id(unit), never) <= sooner_than:
            break
        victims.append(unit)
        freed += unit.range_nbytes
    return victims if freed >= need_nbytes else []


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
            upcoming = [unit for visit in [*visits, *follows] for unit in visit if unit.range_nbytes]
            position = 0
            for offset, visit in enumerate(visits):
                position += sum(1 for unit in visit if unit.range_nbytes)
                self._visit(first + offset, visit, visits[0], upcoming[position:])
            first += len(visits)
        return self._found

    def _visit(self, number: int, visit: Sequence[_Unit], pinned: Sequence[_Unit], upcoming: Sequence[_Unit]) -> None:
        used = {*visit, *pinned}
        for unit in visit:
            if unit.range_nbytes and unit not in self._full:
                self._come(unit, number, self._victims(unit, used, upcoming))
        for unit in used:
            if unit in self._full:
                self._full[unit] = number
        for position, unit in enumerate(upcoming):
            if unit in self._full:
                continue
            victims = self._victims(unit, used, upcoming, sooner_than=position)
            if unit.range_nbytes > self._free_nbytes and not victims:
                return
            self._come(unit, number, victims)

    def _victims(
        self, unit: _Unit, used: set[_Unit], upcoming: Sequence[_Unit], *, sooner_than: int | None = None
    ) -> list[_Unit]:
        missing = unit.range_nbytes - self._free_nbytes
        idle = [other for other in self._full if other not in used]
        return choose_victims(idle, upcoming, missing, sooner_than=sooner_than) if missing > 0 else []

    def _come(self, unit: _Unit, number: int, victims: Sequence[_Unit]) -> None:
        room_after = max((self._full.pop(victim) for victim in victims), default=-1)
        self._free_nbytes += sum(victim.range_nbytes for victim in victims) - unit.range_nbytes
        self._full[unit] = number
        self._found.append(Arrival(unit.name, number, room_after))
