"""How much host memory this process may take: the smaller of what is available and what its cgroup allows."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")


def cgroup_limit_bytes(root: Path = _CGROUP_ROOT, membership: Path = _SELF_CGROUP) -> int | None:
    """The tightest memory limit among this process's cgroup and its ancestors (v2 and v1), or None without one."""
    limits = []
    for line in _lines(membership):
        _hierarchy, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = folder / path.lstrip("/")
        for ancestor in (group, *group.parents):
            if folder not in (ancestor, *ancestor.parents):
                break
            limits += [int(text) for text in _lines(ancestor / name) if text.isdigit()]
    # v1 writes "no limit" as a number near 2^63.
    real = [limit for limit in limits if limit < 1 << 60]
    return min(real, default=None)


def available_host_bytes() -> int:
    """Bytes that can still be taken without pushing others out."""
    available = int(psutil.virtual_memory().available)
    limit = cgroup_limit_bytes()
    if limit is None:
        return available
    return min(available, limit - int(psutil.Process().memory_info().rss))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split("\n")[:-1]
    except OSError:
        return []
