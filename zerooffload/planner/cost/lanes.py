"""Tasks on lanes that share what they run on: how long all of them take, and which lane is busy when. Pure.

[Note: fluid lanes]
A *lane* takes one task at a time: of those that are ready, the one with the least rank. A task that is alone runs at
full speed. Lanes share *pools* (the drive, host memory, cores): a task loads each pool with the part of it that it uses
at full speed, and where the running tasks' loads add up to more than the pool bears, all of them are slowed alike.
Between two events (a task ends, a task begins) speeds do not change, so time goes from event to event. This is the
processor sharing of queueing theory: Kleinrock, "Time-shared Systems: A Theoretical Treatment", 1967.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

Loads = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two kinds of tasks on one pool that hinder each other more, or less, than a pool does.

    Attributes
    ----------
    first, second : frozenset[str]
        Lanes.
    pool : str
    capacity : float
        What the pool bears while both kinds run; 1 while one does. 2: they do not hinder each other.
    """

    first: frozenset[str]
    second: frozenset[str]
    pool: str
    capacity: float


class Task(NamedTuple):
    """Something to do.

    Attributes
    ----------
    lane : str
    seconds : float
        At full speed.
    after : Collection[int]
        Positions of tasks that must be over before, each once.
    rank : int
        Where it comes in its lane, if several are ready: the least first.
    loads : Mapping[str, float]
        Of pools, at full speed.
    takes, frees : str
        A kind of slot that the task needs to begin, and one that is free again when it ends; "" for none.
    name : str
    """

    lane: str
    seconds: float
    after: Collection[int] = ()
    rank: int = 0
    loads: Loads = MappingProxyType({})
    takes: str = ""
    frees: str = ""
    name: str = ""


@dataclass(frozen=True)
class Timing:
    """When each task began and ended, in seconds from the start of the first."""

    begins: Sequence[float]
    ends: Sequence[float]


def run_lanes(tasks: Sequence[Task], pairs: Sequence[Pair] = (), slots: Mapping[str, int] | None = None) -> Timing:
    """Run all tasks.

    Parameters
    ----------
    slots : Mapping[str, int], optional
        How many there are of each kind.

    Raises
    ------
    ValueError
        If a task waits for a later one, or for a slot that nothing will free.
    """
    return _Lanes(tasks, pairs, slots or {}).run()


def busiest_seconds(tasks: Sequence[Task], pairs: Sequence[Pair] = ()) -> float:
    """The least that these tasks take together, whatever waits for whatever: that of the busiest lane or pool."""
    lanes: dict[str, float] = {}
    loads: dict[tuple[str, str], float] = {}
    for (lane, _), (seconds, of_tasks) in _seconds_by_load(tasks).items():
        lanes[lane] = lanes.get(lane, 0.0) + seconds
        for pool, load in of_tasks.items():
            loads[pool, lane] = loads.get((pool, lane), 0.0) + load * seconds
    pools = {pool: _pool_seconds(pool, loads, pairs) for pool, _ in loads}
    return max([*lanes.values(), *pools.values()], default=0.0)


def _seconds_by_load(tasks: Sequence[Task]) -> Mapping[tuple[str, int], tuple[float, Loads]]:
    """Of a lane's tasks with the same loads: most have."""
    seconds: dict[tuple[str, int], float] = {}
    loads: dict[int, Loads] = {}
    for task in tasks:
        key = task.lane, id(task.loads)
        seconds[key] = seconds.get(key, 0.0) + task.seconds
        loads[key[1]] = task.loads
    return {key: (total, loads[key[1]]) for key, total in seconds.items()}


def _pool_seconds(pool: str, loads: Mapping[tuple[str, str], float], pairs: Sequence[Pair]) -> float:
    total = sum(load for (name, _), load in loads.items() if name == pool)
    for pair in pairs:
        if pair.pool == pool:
            one, other = (sum(loads.get((pool, lane), 0.0) for lane in lanes) for lanes in (pair.first, pair.second))
            together = 2 * min(one, other)
            total += together / pair.capacity - together
    return total


class _Lanes:
    def __init__(self, tasks: Sequence[Task], pairs: Sequence[Pair], slots: Mapping[str, int]) -> None:
        self._tasks = tasks
        self._free = dict(slots)
        self._pairs = pairs
        self._begins = [0.0] * len(tasks)
        self._ends = [0.0] * len(tasks)
        self._num_awaited = [len(task.after) for task in tasks]
        self._waiting_for: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for earlier in task.after:
                if earlier >= number:
                    raise ValueError(f"task {number} ({task.name}) waits for a later one, {earlier}")
                self._waiting_for[earlier].append(number)
        self._ready: dict[str, list[tuple[int, int]]] = {task.lane: [] for task in tasks}
        # Lanes that may be able to begin something: one that is ready, or has ended, or for which a slot is free again.
        self._to_try: list[str] = []
        # Of each lane that runs: its task, and what is left of it in seconds at full speed.
        self._running: dict[str, int] = {}
        self._left: dict[str, float] = {}
        # A bit for each lane with each loads: together, those of the tasks that run say how fast they do.
        bits: dict[tuple[str, int], int] = {}
        self._bit_of = [bits.setdefault((task.lane, id(task.loads)), 1 << len(bits)) for task in tasks]
        self._running_bits = 0
        self._speeds_of: dict[int, dict[str, float]] = {}

    def run(self) -> Timing:
        now, num_done = 0.0, 0
        for number, awaited in enumerate(self._num_awaited):
            if not awaited:
                self._make_ready(number)
        while num_done < len(self._tasks):
            self._begin(now)
            if not self._running:
                raise ValueError(f"{len(self._tasks) - num_done} tasks can never begin: no slot is free")
            speeds = self._speeds()
            step = min(self._left[lane] / speeds[lane] for lane in self._running)
            now += step
            for lane in list(self._running):
                self._left[lane] -= step * speeds[lane]
                if self._left[lane] <= 1e-12:
                    num_done += 1
                    self._end(lane, now)
        return Timing(self._begins, self._ends)

    def _make_ready(self, number: int) -> None:
        task = self._tasks[number]
        heapq.heappush(self._ready[task.lane], (task.rank, number))
        self._to_try.append(task.lane)

    def _begin(self, now: float) -> None:
        lanes, self._to_try = self._to_try, []
        for lane in lanes:
            ready = self._ready[lane]
            if not ready or lane in self._running:
                continue
            number, kind = ready[0][1], self._tasks[ready[0][1]].takes
            if not kind or self._free[kind]:
                heapq.heappop(ready)
                if kind:
                    self._free[kind] -= 1
                self._running[lane] = number
                self._running_bits |= self._bit_of[number]
                self._left[lane] = self._tasks[number].seconds
                self._begins[number] = now

    def _end(self, lane: str, now: float) -> None:
        number = self._running.pop(lane)
        self._running_bits ^= self._bit_of[number]
        self._ends[number] = now
        self._to_try.append(lane)
        if self._tasks[number].frees:
            self._free[self._tasks[number].frees] += 1
            self._to_try += self._ready
        for later in self._waiting_for[number]:
            self._num_awaited[later] -= 1
            if not self._num_awaited[later]:
                self._make_ready(later)

    def _speeds(self) -> dict[str, float]:
        """Of each lane that runs: the same whenever the same lanes run with the same loads."""
        speeds = self._speeds_of.get(self._running_bits)
        if speeds is None:
            speeds = self._speeds_of[self._running_bits] = self._speeds_now()
        return speeds

    def _speeds_now(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for number in self._running.values():
            for pool, load in self._tasks[number].loads.items():
                totals[pool] = totals.get(pool, 0.0) + load
        capacity = dict.fromkeys(totals, 1.0)
        for pair in self._pairs:
            if pair.pool in capacity and _any(pair.first, self._running) and _any(pair.second, self._running):
                capacity[pair.pool] = pair.capacity
        slowed = {pool: min(1.0, capacity[pool] / total) for pool, total in totals.items() if total > 0}
        return {
            lane: min((slowed[pool] for pool, load in self._tasks[number].loads.items() if load > 0), default=1.0)
            for lane, number in self._running.items()
        }


def _any(lanes: frozenset[str], running: Mapping[str, int]) -> bool:
    return not lanes.isdisjoint(running)
