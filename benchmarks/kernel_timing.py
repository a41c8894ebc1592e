"""How `adam_kernel.py` times contenders, and what it makes of their seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_arrays import Contenders

# Threads of OpenMP look for more work for some milliseconds before they sleep, on the cores of who comes next.
PAUSE_SECONDS = 0.02

Seconds = dict[str, list[float]]


def measured(contenders: Contenders, repeats: int) -> Seconds:
    """Seconds of each, once a repetition, in rotating order; the first calls do not count."""
    for contender in contenders.values():
        contender()
    names = list(contenders)
    seconds: Seconds = {name: [] for name in names}
    for repetition in range(repeats):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE_SECONDS)
            begin = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"low": values[0], "median": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def ratio(seconds: Seconds, other: str, ours: str) -> dict[str, float]:
    """How many times as fast we are as another, repetition by repetition."""
    return quartiles([theirs / own for theirs, own in zip(seconds[other], seconds[ours], strict=True)])


def fastest(seconds: Seconds, names: Sequence[str]) -> str:
    """Who has the smallest median."""
    return min(names, key=lambda name: statistics.median(seconds[name]))


def row_of(
    ours: str, numel: int, bytes_per_param: float, seconds: Seconds, roles: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """A row of a table: `roles` names the traffic loops and the peers among the contenders."""
    limit = fastest(seconds, roles["limits"])
    times = quartiles(seconds[ours])
    return {
        "name": ours,
        "numel": numel,
        "bytes_per_param": bytes_per_param,
        "gparam_per_second": numel / times["median"] / 1e9,
        "gb_per_second": numel * bytes_per_param / times["median"] / 1e9,
        "seconds_quartiles": times,
        "limit": limit,
        "ratio_to_limit": ratio(seconds, limit, ours),
        "ratio_to_peers": {name: ratio(seconds, name, ours) for name in roles["peers"]},
        "missing_peers": {},
        "seconds": {name: seconds[name] for name in (ours, *roles["limits"], *roles["peers"])},
    }


def huge_bytes() -> int:
    """Of this process, on huge pages; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
