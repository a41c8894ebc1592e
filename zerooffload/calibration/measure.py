"""The whole of it, in less than a minute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerooffload import native
from zerooffload.accelerator import Accelerator, default_accelerator, device_models
from zerooffload.calibration import drives
from zerooffload.calibration.device import device_figures
from zerooffload.calibration.drives import MeasuredDrive, check_paths
from zerooffload.calibration.effort import Effort
from zerooffload.calibration.host import NUM_ARRAYS, host_figures, pinnable_bytes
from zerooffload.calibration.identity import identity
from zerooffload.calibration.profile import profile_of
from zerooffload.calibration.turns import Progress, take_turns
from zerooffload.errors import ConfigError
from zerooffload.formats import GIB, MIB, format_bytes
from zerooffload.machine import OtherPrograms, available_host_bytes, core_share, cpu_name, host_memory_bytes
from zerooffload.planner.profiles import MachineProfile

_OTHER_BYTES = 512 * MIB
"""Matrices, and libraries that are loaded when they are first used."""
_NUM_DEVICE_ARRAYS = 4
"""On host: what a device of the host's memory adds up, or copies."""


def calibrate(
    paths: Sequence[Path] = (),
    accelerator: Accelerator | None = None,
    effort: Effort | None = None,
    progress: Progress = lambda _what, _part: None,
) -> MachineProfile:
    """Measure this machine, in the process that a run would be: its cores, its limits, its device.

    Parameters
    ----------
    paths : sequence of pathlib.Path
        Of the nvme tier, one on each drive. Files of up to 4 GiB are written there, and nothing is left.
    accelerator : Accelerator, optional
        Default: the current device.
    progress : Callable[[str, float], None]
        Is told what is measured next, and which part of all is done.

    Raises
    ------
    ConfigError
        If a path cannot be measured, there is too little memory, or the environment forces a CPU target that is not
        there.
    TierIOError
        If a transfer failed.
    """
    effort = (effort or Effort()).for_drives(len(paths))
    accelerator = accelerator or default_accelerator()
    if native.available:
        # One that is not there is found before anything is measured.
        native.active_target()
    check_paths(paths)
    _check_memory(effort, len(paths))
    with ExitStack() as opened:
        measured = []
        for path in paths:
            progress(f"first writes in {path}", 0.0)
            measured.append(opened.enter_context(MeasuredDrive(path, effort)))
        progress("preparing", 0.0)
        figures = [*device_figures(accelerator, effort), *host_figures(effort)]
        for number, drive in enumerate(measured):
            figures += drive.figures(f"drives.{number}")
        sustained = [f"drives.{number}.sustained_write" for number in range(len(measured))]
        turns_seconds = effort.rounds * sum(figure.seconds for figure in figures)
        all_seconds = turns_seconds + len(sustained) * effort.sustained_seconds
        others = OtherPrograms()
        samples = take_turns(
            figures, effort.rounds, lambda what, part: progress(what, part * turns_seconds / all_seconds)
        )
        for number, (name, drive) in enumerate(zip(sustained, measured, strict=True)):
            progress(name, (turns_seconds + number * effort.sustained_seconds) / all_seconds)
            samples[name] = drive.sustained_writes()
        busy_cores = round(others.busy_cores(), 2)
        facts = _facts(accelerator, effort, [drive.facts() for drive in measured])
        return profile_of({**facts, "busy_cores": busy_cores}, samples)


def _facts(accelerator: Accelerator, effort: Effort, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    models = [] if accelerator.shares_host_memory else device_models()
    memory = host_memory_bytes()
    name, device_memory = (models[0].name, models[0].memory_bytes) if models else (cpu_name(), memory)
    count = max(1, len(models))
    return {
        "name": f"{f'{count} x ' if models else ''}{name}, {memory / GIB:.0f} GiB",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": identity(),
        "device": {
            "name": name,
            "count": count,
            "memory": device_memory,
            "shares_host_memory": accelerator.shares_host_memory,
        },
        "host": {
            "name": cpu_name(),
            "memory": memory,
            "cores": core_share().num_threads,
            "pinnable": pinnable_bytes(accelerator, effort.pin_seconds),
        },
        "drives": list(found),
    }


def _check_memory(effort: Effort, num_drives: int) -> None:
    needed = (NUM_ARRAYS + _NUM_DEVICE_ARRAYS) * effort.array_bytes + num_drives * drives.BUFFER_BYTES + _OTHER_BYTES
    available = available_host_bytes()
    if available < needed:
        raise ConfigError(
            f"calibrating takes {format_bytes(needed)} of host memory, {format_bytes(available)} are free: end other"
            " programs first, which would disturb it too"
        )
