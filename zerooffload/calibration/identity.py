"""What tells this machine and its software from others."""

from __future__ import annotations

import platform

import psutil
import torch

from zerooffload import __version__, native
from zerooffload.accelerator import device_models
from zerooffload.errors import ConfigError
from zerooffload.formats import GIB
from zerooffload.machine import cpu_name

HARDWARE = ("cpu", "cores", "memory", "devices")
"""Other values of these are another machine; others than these, other software."""


def identity() -> dict[str, str]:
    """A profile's `identity`."""
    devices = [model.name for model in device_models()]
    return {
        "cpu": cpu_name(),
        "cores": str(psutil.cpu_count(logical=False) or "unknown"),
        # Kernels keep some of it for themselves, not all the same.
        "memory": f"{psutil.virtual_memory().total / GIB:.0f} GiB",
        "devices": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "none",
        "torch": torch.__version__,
        "kernel": platform.release(),
        "zerooffload": __version__,
        "cpu target": _cpu_target(),
    }


def _cpu_target() -> str:
    if not native.available:
        return "torch operations"
    try:
        return native.active_target()
    except ConfigError:
        # One that was forced and is not there: kernels tell, when they are used.
        return "unknown"
