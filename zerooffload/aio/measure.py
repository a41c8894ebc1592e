"""How fast the engines are on a folder's file system: well under a second for all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from zerooffload.aio.api import Engine
from zerooffload.aio.setups import Setup
from zerooffload.aio.traffic import Mix, Traffic
from zerooffload.formats import MIB

_EXTENT_BYTES = 8 * MIB
_NUM_EXTENTS = 8
_NUM_BUFFERS = 3
_NUM_ROUNDS = 3
_MIX = Mix(1, 1)
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
    traffic = Traffic(folder, _NUM_BUFFERS, _EXTENT_BYTES)
    engines: dict[Setup, Engine] = {}
    try:
        for setup in setups:
            engines[setup] = setup.open()
            traffic.register(engines[setup])
        return _turns(engines, traffic)
    finally:
        for engine in engines.values():
            engine.close()
        traffic.close()


def _turns(engines: dict[Setup, Engine], traffic: Traffic) -> dict[Setup, float]:
    if not engines or traffic.fill(next(iter(engines.values())), _NUM_EXTENTS, _FILL_SECONDS) < _NUM_EXTENTS:
        return {}
    moved_bytes = dict.fromkeys(engines, 0)
    seconds = dict.fromkeys(engines, 0.0)
    # In turns, so that whatever else uses the drive meanwhile slows all of them.
    for _ in range(_NUM_ROUNDS):
        for setup, engine in engines.items():
            start = time.perf_counter()
            moved_bytes[setup] += traffic.move(engine, _MIX, _TURN_SECONDS)
            seconds[setup] += time.perf_counter() - start
    return {setup: moved_bytes[setup] / seconds[setup] for setup in engines}
