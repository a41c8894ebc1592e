"""What a folder is on: its file system, and the drive beneath that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from zerooffload.machine.cgroups import lines_of

_MOUNTS = Path("/proc/self/mountinfo")
_DEVICES = Path("/sys/dev/block")


def file_system(path: Path) -> tuple[str, str]:
    """Type and device of what is mounted at the nearest mount point above `path`."""
    best, found = -1, ("unknown", "unknown")
    target = path.resolve()
    for line in lines_of(_MOUNTS):
        mount, _, source = line.partition(" - ")
        # A space in a mount point is written as \040.
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split(" ")[4]))
        # A later line covers an earlier one at the same place.
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), (source.split(" ")[0], source.split(" ")[1])
    return found


def drive_model(path: Path) -> str:
    """What the folder's drive calls itself, of an array each of its drives; "unknown" for virtual ones."""
    names = [" ".join(" ".join(lines_of(drive / "device/model")).split()) for drive in _drives(path)]
    return " + ".join(name or "unknown" for name in names) or "unknown"


def rotates(path: Path) -> bool:
    """Whether a drive of the folder's says that it rotates, as virtual ones often do too."""
    return any(lines_of(drive / "queue/rotational") == ["1"] for drive in _drives(path))


def _drives(path: Path) -> list[Path]:
    """The kernel's folders of the whole drives that hold `path`; none for what is on no drive."""
    number = path.stat().st_dev
    if os.major(number) == 0:
        # File systems that span drives have a number of their own.
        source = Path(file_system(path)[1])
        number = source.stat().st_rdev if source.is_block_device() else 0
    device = _DEVICES / f"{os.major(number)}:{os.minor(number)}"
    return list(_whole_drives(device.resolve())) if device.exists() else []


def _whole_drives(device: Path) -> Iterator[Path]:
    if (device / "partition").exists():
        device = device.parent
    # What logical volumes and arrays are made of.
    parts = sorted((device / "slaves").glob("*"))
    if not parts:
        yield device
    for part in parts:
        yield from _whole_drives(part.resolve())
