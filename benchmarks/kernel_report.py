"""What `adam_kernel.py` reports: where it ran, its rows and their chart, and which targets are met."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from kernel_arrays import CONFIGURATIONS
from kernel_job import ACCUMULATE_SEPARATE
from kernel_timing import fastest
from plot_bars import Bar, bar_chart

import zerooffload as zo
from zerooffload import native
from zerooffload.machine.cores import usable_cores

FP32_MOMENTS = "the same with fp32 moments"
JOB_TARGET = 0.9


def machine(threads: int) -> dict[str, Any]:
    """Where this runs."""
    setting, cpus = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "platform": platform.platform(),
        "cpu": models[0] if models else platform.processor(),
        "cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "transparent_huge_pages": setting.read_text().strip() if setting.exists() else "unknown",
        "torch_huge_pages": os.environ["THP_MEM_ALLOC_ENABLE"] == "1",
        "load_average": list(psutil.getloadavg()),
        "target": native.module.active_target(),
        "threads": threads,
    }


def versions() -> dict[str, str]:
    """Of everything that takes part, as far as it is installed."""
    found = {"zerooffload": zo.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("deepspeed", "torchao", "bitsandbytes"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def show(row: dict[str, Any]) -> None:
    """Print a row, and its peers under it."""
    limit = row["ratio_to_limit"]
    print(
        f"{row['name']:24}{row['gparam_per_second']:9.3f}{row['bytes_per_param']:9.2f}{row['gb_per_second']:8.1f}"
        f"{limit['median']:9.3f} [{limit['low']:.3f}, {limit['high']:.3f}]"
    )
    for name, numbers in row["ratio_to_peers"].items():
        print(f"    {numbers['median']:6.2f} [{numbers['low']:.2f}, {numbers['high']:.2f}] times {name}")
    for name, reason in row["missing_peers"].items():
        print(f"    {name}: {reason}")
    if "sweeps" in row:
        print(f"    {row['sweeps']['median']:6.2f} sweeps, of the step's traffic")
    sys.stdout.flush()


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """Each row's ratio to its limit, as SVG."""
    bars = []
    for row in rows:
        spread = row["ratio_to_limit"]
        bars.append(Bar(row["name"], spread["median"], spread["low"], spread["high"], row["target"]))
    return bar_chart("Speed, as a share of what memory traffic alone allows", bars)


def check(name: str, value: float, target: float, better: str = "higher") -> dict[str, Any]:
    """A figure and its target, which itself is good enough."""
    ok = value >= target if better == "higher" else value <= target
    return {"name": name, "value": value, "target": target, "better": better, "ok": ok}


def step_checks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the first table."""
    checks = []
    for row in rows:
        peers = {name: numbers["median"] for name, numbers in row["ratio_to_peers"].items()}
        if row["target"] is not None:
            checks.append(check(f"{row['name']}: of its limit", row["ratio_to_limit"]["median"], row["target"]))
        if row["name"] == CONFIGURATIONS[0].name:
            nearest = fastest(row["seconds"], list(peers))
            checks.append(check(f"{row['name']}: times {nearest}, its fastest peer", peers[nearest], 0.98))
        if FP32_MOMENTS in peers:
            # As fast is not faster.
            faster = check(f"{row['name']}: times {FP32_MOMENTS}", peers[FP32_MOMENTS], 1.0)
            checks.append(faster | {"ok": peers[FP32_MOMENTS] > 1.0})
    return checks


def job_checks(first: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the second table."""
    nearest = fastest(whole["seconds"], list(whole["ratio_to_peers"]))
    return [
        check(
            f"{first['name']}: times {ACCUMULATE_SEPARATE}", first["ratio_to_peers"][ACCUMULATE_SEPARATE]["median"], 4.0
        ),
        check("whole job: sweeps, of the step's traffic", whole["sweeps"]["median"], 2.0, "lower"),
        check("whole job: of its limit", whole["ratio_to_limit"]["median"], JOB_TARGET),
        check(f"whole job: times {nearest}, the fastest sequence", whole["ratio_to_peers"][nearest]["median"], 2.0),
    ]
