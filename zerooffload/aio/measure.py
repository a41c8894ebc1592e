"""How fast the engines are on a folder's file system: well under a second for all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from zerooffload.accelerator.pages import populated_pages
from zerooffload.aio.api import Engine, OpenFile
from zerooffload.aio.native_engine import NativeEngine, NativeTicket
from zerooffload.aio.setups import Setup
from zerooffload.formats import MIB

_EXTENT_BYTES = 8 * MIB
_NUM_EXTENTS = 8
_NUM_BUFFERS = 3
_NUM_ROUNDS = 3
_TURN_SECONDS = 0.03
_FILL_SECONDS = 0.3
"""A drive that does not take the file in this time is slower than any engine: there is nothing to choose."""


def measure(folder: Path, setups: Iterable[Setup]) -> dict[Setup, float]:
    """Bytes a second of each setup, reading and writing at the same time; empty for a slow drive.

    Takes 64 MiB of space and 24 MiB of memory; nothing is left.

    Raises
    ------
    OSError
        If the folder's file system has no direct I/O, or a transfer failed.
    """
    file = _scratch_file(folder)
    engines: dict[Setup, NativeEngine] = {}
    try:
        buffers = [_noise() for _ in range(_NUM_BUFFERS)]
        for setup in setups:
            engines[setup] = setup.open()
            for buffer in buffers:
                engines[setup].register(buffer)
        return _turns(engines, file, buffers)
    finally:
        for engine in engines.values():
            engine.close()
        file.close()


def _turns(engines: dict[Setup, NativeEngine], file: OpenFile, buffers: list[torch.Tensor]) -> dict[Setup, float]:
    if not engines or not _fill(next(iter(engines.values())), file, buffers[0]):
        return {}
    moved_bytes = dict.fromkeys(engines, 0)
    seconds = dict.fromkeys(engines, 0.0)
    # In turns, so that whatever else uses the drive meanwhile slows all of them.
    for _ in range(_NUM_ROUNDS):
        for setup, engine in engines.items():
            start = time.perf_counter()
            moved_bytes[setup] += _keep_busy(engine, file, buffers, start + _TURN_SECONDS)
            seconds[setup] += time.perf_counter() - start
    return {setup: moved_bytes[setup] / seconds[setup] for setup in engines}


def _scratch_file(folder: Path) -> OpenFile:
    fd, name = tempfile.mkstemp(prefix=".zerooffload-probe-", dir=folder)
    try:
        os.close(fd)
        return OpenFile(Path(name), os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), direct=True)
    finally:
        # It lives as long as it is open.
        Path(name).unlink()


def _noise() -> torch.Tensor:
    """Some file systems and drives make short work of zeros."""
    block = torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    buffer = populated_pages(_EXTENT_BYTES)
    buffer.view(-1, MIB).copy_(block)
    return buffer


def _fill(engine: Engine, file: OpenFile, buffer: torch.Tensor) -> bool:
    """Write every extent once; whether that was quick."""
    start = time.perf_counter()
    for extent in range(_NUM_EXTENTS):
        engine.submit_write(file, extent * _EXTENT_BYTES, buffer).wait()
        if time.perf_counter() - start > _FILL_SECONDS:
            return False
    return True


def _keep_busy(engine: NativeEngine, file: OpenFile, buffers: list[torch.Tensor], until: float) -> int:
    """Read and write in turn, an extent for each buffer at a time; the bytes that were moved."""
    tickets: list[NativeTicket] = []
    number = 0
    while time.perf_counter() < until:
        if len(tickets) == len(buffers):
            tickets.pop(0).wait()
        submit = engine.submit_write if number % 2 else engine.submit_read
        offset_bytes = number % _NUM_EXTENTS * _EXTENT_BYTES
        tickets.append(submit(file, offset_bytes, buffers[number % len(buffers)]))
        number += 1
    for ticket in tickets:
        ticket.wait()
    return number * _EXTENT_BYTES
