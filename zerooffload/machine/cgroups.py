"""The control groups that this process is in (cgroup v1, v2, and both at once)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cgroup_folders(
    controller: str, root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP
) -> Iterator[tuple[Path, int]]:
    """The folders of the process's own group and of its ancestors, each with its version, 1 or 2.

    A limit of any of them binds the process. In a container the path may lead out of what is mounted: then only the
    root is seen, which is the container's own group.
    """
    for line in lines_of(membership):
        _hierarchy, controllers, path = line.split(":", 2)
        if controllers == "":
            # Beside v1 hierarchies, v2 is mounted one level down.
            unified = root / "unified"
            mount, version = (unified if unified.is_dir() else root), 2
        elif controller in controllers.split(","):
            mount, version = root / controller, 1
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if mount not in (folder, *folder.parents):
                break
            yield folder, version


def number_in(path: Path) -> int | None:
    """The one number that a file holds, or None: no such file, or a word such as "max"."""
    words = lines_of(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None


def lines_of(path: Path) -> list[str]:
    """The lines of a small file of the kernel's, none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
