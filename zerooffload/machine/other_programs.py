"""How busy other programs keep the cores that this process may use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from zerooffload.machine.cores import affinity

_KINDS = ("user", "nice", "system", "steal")
"""Of a core's time, what programs take; stolen is what others of the machine that this one is simulated on take."""


class Used(NamedTuple):
    """Seconds: of a clock, those that these cores were busy, and those that this process has kept them busy."""

    clock: float
    busy: float
    own: float


def _used() -> Used:
    of_cores = psutil.cpu_times(percpu=True)
    mine = [of_cores[core] for core in affinity() if core < len(of_cores)]
    busy = sum(getattr(times, kind, 0.0) for times in mine for kind in _KINDS)
    return Used(time.perf_counter(), busy, time.process_time())


class OtherPrograms:
    """Watched from when it is made."""

    def __init__(self, used: Callable[[], Used] = _used) -> None:
        self._used = used
        self._begin = used()

    def busy_cores(self) -> float:
        """Cores that they kept busy, on average since: of those that this process may use, so never more.

        The time of cores is counted in ticks of 10 ms: within a few of them it may be more than the clock's.
        """
        now = self._used()
        clock, busy, own = (last - first for first, last in zip(self._begin, now, strict=True))
        return min(max(0.0, busy - own) / clock, len(affinity())) if clock > 0 else 0.0
