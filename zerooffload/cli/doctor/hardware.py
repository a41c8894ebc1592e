"""Findings about cores, memory and GPUs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from zerooffload.accelerator import Accelerator, default_accelerator, device_models
from zerooffload.calibration.host import pinnable_bytes
from zerooffload.cli.doctor.finding import Finding, Verdict
from zerooffload.formats import GIB, MIB, format_bytes
from zerooffload.machine import (
    available_host_bytes,
    cgroup_limit_bytes,
    cpu_name,
    cpu_quota,
    lockable_bytes,
    this_ranks_cores,
    usable_cores,
)

_LITTLE_MEMORY_BYTES = 2 * GIB
_LITTLE_MEMLOCK_BYTES = 64 * MIB
_PIN_SECONDS = 0.5
_DRIVER = Path("/proc/driver/nvidia/version")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def hardware_findings() -> Iterator[Finding]:
    """Cores, threads, memory and its limits, GPUs."""
    yield Finding("CPU", cpu_name())
    yield _cores()
    yield _numa()
    yield _threads()
    yield _memory()
    yield _memory_cgroup()
    yield _memlock()
    yield _pinned(default_accelerator())
    yield _huge_pages()
    yield _gpu()


def _cores() -> Finding:
    machine = os.cpu_count() or 1
    usable, quota = usable_cores(), cpu_quota()
    value = f"{usable} usable of {machine} logical ({psutil.cpu_count(logical=False) or '?'} physical)"
    if quota is not None and quota < usable:
        return Finding("cores", f"{value}, CPU quota {quota:g}")
    return Finding("cores", value)


def _numa() -> Finding:
    nodes = this_ranks_cores().nodes
    value = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
    if len(nodes) > 1:
        advice = (
            "memory of another node is slower: train with a rank for each node, or bind the run to one"
            f" (numactl --cpunodebind={nodes[0]} --membind={nodes[0]})"
        )
        return Finding("NUMA", value, Verdict.NOTE, advice)
    return Finding("NUMA", value)


def _threads() -> Finding:
    torch_threads, usable = torch.get_num_threads(), usable_cores()
    settings = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
    share = this_ranks_cores()
    kernel = f"optimizer kernel {share.num_threads} on {len(share.cores)} cores"
    value = f"torch {torch_threads} ({', '.join(settings) or 'no settings'}), {kernel}"
    if torch_threads > usable:
        return Finding("threads", value, Verdict.NOTE, f"set OMP_NUM_THREADS={usable}: more threads than cores wait")
    return Finding("threads", value)


def _memory() -> Finding:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    value = (
        f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}, swap {format_bytes(swap.total)}"
    )
    if memory.available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", value, Verdict.NOTE, "little is left: set host_memory to what the run may take")
    return Finding("memory", value)


def _memory_cgroup() -> Finding:
    limit = cgroup_limit_bytes()
    if limit is None:
        return Finding("memory cgroup", "no limit")
    left_bytes = available_host_bytes()
    value = f"limit {format_bytes(limit)}, {format_bytes(left_bytes)} left; budgets are planned against it"
    if left_bytes < _LITTLE_MEMORY_BYTES:
        return Finding("memory cgroup", value, Verdict.NOTE, "raise the group's limit, or end what else runs in it")
    return Finding("memory cgroup", value)


def _memlock() -> Finding:
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    value = f"soft {soft}, hard {hard}"
    lockable = lockable_bytes()
    if lockable is not None and lockable < _LITTLE_MEMLOCK_BYTES:
        advice = (
            "raise it (ulimit -l) if memory is to be pinned for a GPU or registered for I/O; nothing needs it on a CPU"
        )
        return Finding("locked memory", value, Verdict.NOTE, advice)
    return Finding("locked memory", value)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else format_bytes(value)


def _pinned(accelerator: Accelerator) -> Finding:
    if accelerator.shares_host_memory:
        return Finding("pinned memory", "no device to pin it for")
    most = pinnable_bytes(accelerator, _PIN_SECONDS)
    if most is None:
        return Finding("pinned memory", "all that was tried")
    advice = "copies from and to more than that are slow: keep host_memory below it, or raise the system's limit"
    return Finding("pinned memory", f"no more than {format_bytes(most)}", Verdict.NOTE, advice)


def _huge_pages() -> Finding:
    text = " ".join(_words(_HUGE_PAGES))
    if not text:
        return Finding("huge pages", "unknown: the kernel does not tell", Verdict.NOTE)
    if "[never]" in text:
        advice = f"direct I/O is 1.4 to 4 times slower on 4 KiB pages: echo madvise > {_HUGE_PAGES} as root"
        return Finding("huge pages", text, Verdict.NOTE, advice)
    return Finding("huge pages", text)


def _gpu() -> Finding:
    if found := device_models():
        return Finding("GPU", "; ".join(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in found))
    if torch.version.cuda is None and _DRIVER.exists():
        advice = "install torch for CUDA, as the selector on PyTorch's home page says"
        return Finding("GPU", "not in use: a driver is there, and this torch is a CPU build", Verdict.NOTE, advice)
    if torch.version.cuda is None:
        return Finding("GPU", "none in use: this torch is a CPU build; training runs on the CPU")
    return Finding("GPU", "none found; training runs on the CPU", Verdict.NOTE, "with a GPU there, check nvidia-smi")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
