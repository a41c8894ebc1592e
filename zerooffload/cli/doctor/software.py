"""Findings about what is installed, and what of it is in use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch

from zerooffload import __version__, native
from zerooffload.aio import choose_engine
from zerooffload.aio.device_reads import find_kvikio
from zerooffload.cli.doctor.finding import Finding, Verdict
from zerooffload.errors import ConfigError

_OLDEST_TORCH = (2, 8)


def software_findings() -> Iterator[Finding]:
    """Versions, native module, CPU target, I/O engine, kvikio."""
    yield Finding("zerooffload", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield _torch()
    yield _native_module()
    yield _cpu_target()
    yield _io_engine()
    yield _kvikio()


def _torch() -> Finding:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    value = f"{torch.__version__} ({cuda})"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        return Finding("torch", value, Verdict.PROBLEM, "install torch 2.8 or newer")
    return Finding("torch", value)


def _native_module() -> Finding:
    if native.available:
        return Finding("native module", "loaded")
    return Finding(
        "native module",
        f"not in use: {native.why_unavailable}",
        Verdict.NOTE,
        "kernels run as torch operations and I/O through aiofiles, both slower: install with a C++17 compiler at hand",
    )


def _cpu_target() -> Finding:
    if not native.available:
        return Finding("CPU target", "torch operations")
    forced, supported = os.environ.get(native.TARGET_VARIABLE), ", ".join(native.module.supported_targets())
    try:
        active = native.active_target()
    except ConfigError as error:
        return Finding("CPU target", f"{forced!r} is not there", Verdict.PROBLEM, str(error))
    how = f", forced by {native.TARGET_VARIABLE}" if forced else ""
    return Finding("CPU target", f"{active}{how} (this CPU and build: {supported})")


def _io_engine() -> Finding:
    chosen = choose_engine()
    chosen.engine.close()
    value = f"{chosen.engine.name}: {chosen.reason}"
    if not native.available:
        return Finding("I/O engine", value, Verdict.NOTE, "it needs the native module to be faster")
    return Finding("I/O engine", value)


def _kvikio() -> Finding:
    subject, found = "GPUDirect Storage", find_kvikio()
    if not isinstance(found, str):
        return Finding(
            subject, f"kvikio {getattr(found, '__version__', '')}: tried on each --path, where a GPU computes"
        )
    return Finding(subject, f"not in use, which is usual: {found}")
