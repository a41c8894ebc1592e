"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from zerooffload.machine.cgroups import CGROUP_ROOT, MEMBERSHIP, cgroup_folders, lines_of, number_in


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
