"""Memory of this process as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def process_resident_bytes() -> int:
    """Resident set of this process, now."""
    return int(psutil.Process().memory_info().rss)


def process_peak_bytes() -> int:
    """Peak resident set (VmHWM: `ru_maxrss` is inherited over exec); the present one where the kernel does not tell."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return process_resident_bytes()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return process_resident_bytes()
