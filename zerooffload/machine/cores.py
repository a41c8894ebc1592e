"""How many cores this process may use, and which of them are this rank's."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zerooffload.machine.cgroups import CGROUP_ROOT, MEMBERSHIP, cgroup_folders, lines_of, number_in

_TOPOLOGY = Path("/sys/devices/system")
_CPUS = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The CPU's model, or what is known of it."""
    names = (line.partition(":")[2].strip() for line in lines_of(_CPUS) if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(affinity())


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Cores' worth of time that the process's control groups allow, or None without a limit."""
    quotas = []
    for folder, version in cgroup_folders("cpu", root, membership):
        if version == 1:
            quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
        else:
            words = " ".join(lines_of(folder / "cpu.max")).split()
            quota, period = (int(word) if word.isdigit() else None for word in (words if len(words) == 2 else ("", "")))
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


@dataclass(frozen=True)
class CoreShare:
    """A rank's part of the machine's cores.

    Attributes
    ----------
    cores : tuple[int, ...]
        Logical cores; those of one NUMA node are next to each other.
    num_threads : int
        Threads that keep them busy where memory is the limit: one for each physical core, and no more than the CPU
        quota has time for.
    nodes : tuple[int, ...]
        Their NUMA nodes.
    """

    cores: tuple[int, ...]
    num_threads: int
    nodes: tuple[int, ...]


def core_share(local_rank: int = 0, local_world_size: int = 1, topology: Path = _TOPOLOGY) -> CoreShare:
    """The cores of one of the ranks that share this machine.

    Ranks that were bound to cores of their own keep those. Others divide what they may all run on, by whole physical
    cores in the order of the NUMA nodes, so that a rank stays in one node where it can.
    """
    node_of = _nodes(topology)
    groups = _by_physical_core(affinity(), node_of, topology)
    num_online = len(_cpu_list(" ".join(lines_of(topology / "cpu/online")))) or (os.cpu_count() or 1)
    if sum(map(len, groups)) * local_world_size > num_online:
        start, stop = (len(groups) * rank // local_world_size for rank in (local_rank, local_rank + 1))
        # More ranks than cores: they share them in turn.
        groups = groups[start:stop] or [groups[local_rank % len(groups)]]
    cores = tuple(core for group in groups for core in group)
    quota = cpu_quota()
    num_threads = len(groups) if quota is None else min(len(groups), math.ceil(quota / local_world_size))
    return CoreShare(cores, num_threads, tuple(sorted({node_of.get(core, 0) for core in cores})))


def this_ranks_cores() -> CoreShare:
    """The share of this process, by LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them."""
    return core_share(int(os.environ.get("LOCAL_RANK", "0")), ranks_of_this_machine())


def ranks_of_this_machine() -> int:
    """Ranks that share this machine's cores, memory and drives, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def affinity() -> list[int]:
    """The logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _by_physical_core(cores: Iterable[int], node_of: dict[int, int], topology: Path) -> list[list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for core in cores:
        siblings = _cpu_list(" ".join(lines_of(topology / f"cpu/cpu{core}/topology/thread_siblings_list")))
        groups.setdefault((node_of.get(core, 0), min(siblings, default=core)), []).append(core)
    return [groups[key] for key in sorted(groups)]


def _nodes(topology: Path) -> dict[int, int]:
    folders = topology.glob("node/node[0-9]*")
    return {
        core: int(folder.name.removeprefix("node"))
        for folder in folders
        for core in _cpu_list(" ".join(lines_of(folder / "cpulist")))
    }


def _cpu_list(text: str) -> list[int]:
    """The kernel's notation: "0-3,8"."""
    cores: list[int] = []
    for part in text.split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
