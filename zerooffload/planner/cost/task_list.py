"""Tasks of a step, from bytes: which lane moves them, how long that takes, and what it loads. Pure.

[Note: lanes of a step]
compute         the device, and on a CPU the thread that trains
copy in, out    each direction of the link to the device
link            gathers and reductions between ranks
parameter read  from the drive, because a visit needs them
state read      from the drive, for the update
write           to the drive
update          the kernel on the host, and the checksums of what it writes
landing         gradients that join their home on the host

Pools: the drive (reads share it, with writes too), host memory, and, where the device is the CPU, its cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from zerooffload.planner.cost.lanes import Pair, Task
from zerooffload.planner.cost.speeds import Speeds


class Lane(StrEnum):
    """See the note."""

    COMPUTE = "compute"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    LINK = "link"
    PARAMETER_READ = "parameter read"
    STATE_READ = "state read"
    WRITE = "write"
    UPDATE = "update"
    LANDING = "landing"


RING = "staging ring"
"""What has slots that a task takes, or frees."""
_DRIVE, _MEMORY, _CORES, _COPIES = "drive", "host memory", "cores", "copies"
_DRIVE_LOADS: Mapping[str, float] = {_DRIVE: 1.0}
_NO_LOADS: Mapping[str, float] = {}


def pairs_of(speeds: Speeds) -> list[Pair]:
    """Lanes that share a pool in another way than by adding up."""
    reads = frozenset({str(Lane.PARAMETER_READ), str(Lane.STATE_READ)})
    return [
        Pair(first=reads, second=frozenset({str(Lane.WRITE)}), pool=_DRIVE, capacity=speeds.drive_mix),
        Pair(
            first=frozenset({str(Lane.COPY_IN)}),
            second=frozenset({str(Lane.COPY_OUT)}),
            pool=_COPIES,
            capacity=speeds.copy_mix,
        ),
    ]


class TaskList:
    """Grows. Each method adds a task behind others, by position, and gives what waits for it: without bytes, those.

    Parameters
    ----------
    shares_host : bool
        Whether the device is the CPU.

    Attributes
    ----------
    tasks : list[Task]
    """

    def __init__(self, speeds: Speeds, *, shares_host: bool) -> None:
        self.tasks: list[Task] = []
        self._speeds, self._shares_host = speeds, shares_host
        # Of what runs on all cores, where the device computes on them too.
        self._core_loads = {_CORES: 1.0} if shares_host else {}
        self._kernel_loads = {_MEMORY: speeds.kernel / speeds.host_memory, **self._core_loads}
        self._copies = {lane: self._copy(lane) for lane in (Lane.COPY_IN, Lane.COPY_OUT)}

    def __len__(self) -> int:
        return len(self.tasks)

    def compute(self, seconds: float, after: Sequence[int], name: str) -> int:
        """What the thread that trains waits for."""
        return self._add(Lane.COMPUTE, seconds, after, self._core_loads, name)

    def landing(self, traffic_nbytes: float, after: Sequence[int], name: str) -> list[int]:
        """Gradients join their home: by the kernel, so many bytes of host memory."""
        if not traffic_nbytes:
            return list(after)
        seconds = self._speeds.corrected("landing", traffic_nbytes / self._speeds.kernel)
        return [self._add(Lane.LANDING, seconds, after, self._kernel_loads, name)]

    def update(self, seconds: float, after: Sequence[int], name: str, rank: int, *, frees: bool) -> int:
        """By the kernel."""
        return self._add(Lane.UPDATE, seconds, after, self._kernel_loads, name, rank=rank, frees=RING if frees else "")

    def read(
        self, lane: Lane, nbytes: float, after: Sequence[int], name: str, rank: int = 0, *, takes: bool = False
    ) -> list[int]:
        """From the drive, into a slot of the ring with `takes`."""
        if not nbytes:
            return list(after)
        seconds = self._speeds.corrected("drive", nbytes / self._speeds.read)
        return [self._add(lane, seconds, after, _DRIVE_LOADS, name, rank=rank, takes=RING if takes else "")]

    def write(self, nbytes: float, after: Sequence[int], name: str, rank: int = 0, *, frees: bool = False) -> list[int]:
        """To the drive, out of a slot of the ring with `frees`."""
        if not nbytes:
            return list(after)
        seconds = self._speeds.corrected("drive", nbytes / self._speeds.write)
        return [self._add(Lane.WRITE, seconds, after, _DRIVE_LOADS, name, rank=rank, frees=RING if frees else "")]

    def commit(self, after: Sequence[int]) -> int:
        """Over when these are."""
        return self._add(Lane.WRITE, 0.0, after, _NO_LOADS, "commit")

    def copy(self, lane: Lane, nbytes: float, after: Sequence[int], name: str) -> list[int]:
        """Between host and device."""
        if not nbytes:
            return list(after)
        rate, loads = self._copies[lane]
        return [self._add(lane, self._speeds.corrected("copies", nbytes / rate), after, loads, name)]

    def _copy(self, lane: Lane) -> tuple[float, Mapping[str, float]]:
        """The rate of copies, and what they load."""
        if self._shares_host:
            # By the CPU, from memory to memory: what is read is written too.
            return self._speeds.host_memory / 2, {_MEMORY: 1.0, _CORES: 1.0}
        rate = self._speeds.copy_in if lane is Lane.COPY_IN else self._speeds.copy_out
        return rate, {_COPIES: 1.0, _MEMORY: rate / self._speeds.host_memory}

    def link(self, nbytes: float, after: Sequence[int], name: str) -> list[int]:
        """Between ranks."""
        if not nbytes:
            return list(after)
        return [
            self._add(Lane.LINK, self._speeds.corrected("link", nbytes / self._speeds.gather), after, _NO_LOADS, name)
        ]

    def _add(
        self,
        lane: Lane,
        seconds: float,
        after: Sequence[int],
        loads: Mapping[str, float],
        name: str,
        *,
        rank: int = 0,
        takes: str = "",
        frees: str = "",
    ) -> int:
        waits = set(after) if len(after) > 1 else after
        self.tasks.append(Task(lane, seconds, waits, rank, loads, takes, frees, name))
        return len(self.tasks) - 1
