"""How much host memory this process may take: the smaller of what the machine has and what its control groups leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerooffload.machine.cgroups import CGROUP_ROOT, MEMBERSHIP, cgroup_folders, lines_of, number_in

_STATUS = Path("/proc/self/status")
_CAPABILITY_IPC_LOCK = 14
_UNLIMITED = 1 << 60
"""v1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a memory limit.

    Attributes
    ----------
    limit_bytes : int
    used_bytes : int
        By all its processes, without file cache that the kernel drops as soon as somebody needs the memory.
    """

    limit_bytes: int
    used_bytes: int


def memory_groups(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> Iterator[MemoryGroup]:
    """The groups that limit this process: its own, and ancestors of it."""
    for folder, version in cgroup_folders("memory", root, membership):
        if version == 1:
            names, usage, reclaimable = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_inactive_file"
        else:
            # Above memory.high the kernel slows a group's processes until they give memory back.
            names, usage, reclaimable = ["memory.max", "memory.high"], "memory.current", "inactive_file"
        limits = [limit for name in names if (limit := number_in(folder / name)) is not None and limit < _UNLIMITED]
        if limits:
            used = (number_in(folder / usage) or 0) - _statistic(folder / "memory.stat", reclaimable)
            yield MemoryGroup(min(limits), max(0, used))


def cgroup_limit_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """The tightest memory limit among this process's control groups, or None without one."""
    return min((group.limit_bytes for group in memory_groups(root, membership)), default=None)


def host_memory_bytes() -> int:
    """What this process and all others of its group can hold at the very most."""
    limit = cgroup_limit_bytes()
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def available_host_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Bytes that can still be taken without pushing others out."""
    rooms = (group.limit_bytes - group.used_bytes for group in memory_groups(root, membership))
    return max(0, min((int(psutil.virtual_memory().available), *rooms)))


def lockable_bytes() -> int | None:
    """Bytes that this process may still lock in memory (RLIMIT_MEMLOCK), or None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = dict(line.split(":", 1) for line in lines_of(_STATUS) if ":" in line)
    privileged = int(status.get("CapEff", "0").strip(), 16) >> _CAPABILITY_IPC_LOCK & 1
    if limit == resource.RLIM_INFINITY or privileged:
        return None
    locked = int(status.get("VmLck", "0 kB").split()[0]) * 1024
    return max(0, limit - locked)


def _statistic(path: Path, name: str) -> int:
    for line in lines_of(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
