"""Which engine moves the bytes, and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerooffload import native
from zerooffload.aio.api import Engine
from zerooffload.errors import ConfigError

if TYPE_CHECKING:
    from zerooffload.accelerator import Accelerator
    from zerooffload.aio.setups import Setup

_NAMES = ("auto", "uring", "threads", "aiofiles", "kvikio")
_AS_FAST = 0.95
"""Of the fastest's rate: the same, for measurements as short as these."""
_log = logging.getLogger("zerooffload")


@dataclass(frozen=True)
class ChosenEngine:
    """An engine and the reason for it.

    Attributes
    ----------
    engine : Engine
    reason : str
    rates : mapping of str to float
        Bytes a second of each engine that was measured, with its best settings.
    """

    engine: Engine
    reason: str
    rates: Mapping[str, float] = field(default_factory=dict)


def choose_engine(
    name: str = "auto",
    folder: Path | None = None,
    *,
    measure_again: bool = False,
    device: Accelerator | None = None,
) -> ChosenEngine:
    """The engine of that name, or for "auto" the fastest that works here.

    Parameters
    ----------
    name : str
        "auto", "uring", "threads", "aiofiles" or "kvikio".
    folder : pathlib.Path, optional
        Where the files will be. "auto" then measures there what is fastest, once for each drive. Without it, io_uring
        is taken where it works.
    measure_again : bool
        Forget what was measured on that drive before.
    device : Accelerator, optional
        Whose memory files are to be read into. If it is not the host's, kvikio is tried, and taken where it is faster.
        Without a device, "kvikio" is what "auto" is.

    Raises
    ------
    ConfigError
        If an engine forced by name cannot work here: it never falls back.
    """
    if name not in _NAMES:
        raise ConfigError(f"unknown I/O engine {name!r}: expected {', '.join(_NAMES[:-1])} or {_NAMES[-1]}")
    if name in ("auto", "kvikio"):
        chosen = _chosen("auto", folder, measure_again=measure_again)
        is_forced = name == "kvikio"
        if folder is not None and device is not None and (is_forced or not device.shares_host_memory):
            chosen = _for_device(chosen, folder, device, is_forced=is_forced)
    else:
        chosen = _chosen(name, folder, measure_again=measure_again)
    _log.info("I/O engine: %s (%s)", chosen.engine.name, chosen.reason)
    return chosen


def _for_device(host: ChosenEngine, folder: Path, device: Accelerator, *, is_forced: bool) -> ChosenEngine:
    """That engine, or kvikio beside it."""
    from zerooffload.aio.device_reads import DeviceReads, try_device_reads, with_device_reads  # noqa: PLC0415

    if device.shares_host_memory:
        found = DeviceReads(f"{device.name} has no memory of its own to read into")
    else:
        found = try_device_reads(host.engine, folder, device)
    if is_forced and found.why_not:
        host.engine.close()
        raise _cannot_work("kvikio", found.why_not)
    if is_forced or found.is_faster:
        reason = f"{found}; else {host.engine.name}: {host.reason}"
        return ChosenEngine(with_device_reads(host.engine), reason, host.rates)
    # That something optional is not there is no news.
    return host if found.why_not else replace(host, reason=f"{host.reason}; {found}")


def _chosen(name: str, folder: Path | None, *, measure_again: bool) -> ChosenEngine:
    if name == "aiofiles":
        return _aiofiles("forced by name")
    why_not = _why_not(name)
    if name != "auto":
        if why_not:
            raise _cannot_work(name, why_not)
        return ChosenEngine(_default(name), "forced by name")
    if not native.available:
        return _aiofiles(why_not)
    why_no_ring = _why_not("uring")
    if folder is not None:
        return _fastest(folder, why_no_ring, measure_again=measure_again)
    if why_no_ring:
        return ChosenEngine(_default("threads"), why_no_ring)
    return ChosenEngine(_default("uring"), "io_uring works here")


def _cannot_work(name: str, why_not: str) -> ConfigError:
    others = " or ".join(repr(other) for other in _NAMES if other not in (name, "uring", "kvikio"))
    return ConfigError(f"the I/O engine {name!r} was forced, but cannot work: {why_not}. Use {others}.")


def _why_not(name: str) -> str:
    """Why an engine cannot work here; "" if it can."""
    if not native.available:
        return f"no native module: {native.why_unavailable}"
    if name == "uring":
        from zerooffload.aio.uring import try_uring, why_unavailable  # noqa: PLC0415 - needs the native module

        try:
            try_uring()
        except OSError as error:
            return why_unavailable(error)
    return ""


def _fastest(folder: Path, why_no_ring: str, *, measure_again: bool) -> ChosenEngine:
    from zerooffload.aio.measure import measure  # noqa: PLC0415 - needs the native module
    from zerooffload.aio.remembered import recall, remember  # noqa: PLC0415
    from zerooffload.aio.setups import SETUPS  # noqa: PLC0415

    working = [setup for setup in SETUPS if not (why_no_ring and setup.engine == "uring")]
    suffix = f"; {why_no_ring}" if why_no_ring else ""
    try:
        rates = None if measure_again else recall(folder)
        if rates is None or not set(rates) <= set(working):
            rates = measure(folder, working)
            remember(folder, rates)
    except OSError as error:
        return ChosenEngine(working[0].open(), f"nothing could be measured in {folder}: {error}{suffix}")
    if not rates:
        return ChosenEngine(working[0].open(), f"the drive of {folder} is slower than any engine{suffix}")
    setup = next(setup for setup in working if rates.get(setup, 0.0) >= _AS_FAST * max(rates.values()))
    best = _best_of_each(rates)
    measured = ", ".join(f"{name} {rate / 1e6:.0f} MB/s" for name, rate in best.items())
    return ChosenEngine(setup.open(), f"measured on the drive of {folder}: {measured}; {setup}{suffix}", best)


def path_speeds(folders: Sequence[Path]) -> list[float]:
    """What each folder's drive bears, reading and writing at the same time, in bytes a second; 1 each if unknown."""
    if len(folders) < 2 or not native.available:
        return [1.0] * len(folders)
    fastest = []
    for folder in folders:
        chosen = choose_engine("auto", folder)
        chosen.engine.close()
        fastest.append(max(chosen.rates.values(), default=0.0))
    # An unmeasured drive cannot be compared with others.
    return fastest if all(fastest) else [1.0] * len(folders)


def _best_of_each(rates: Mapping[Setup, float]) -> dict[str, float]:
    best: dict[str, float] = {}
    for setup, rate in rates.items():
        best[setup.engine] = max(rate, best.get(setup.engine, 0.0))
    return best


def _default(name: str) -> Engine:
    from zerooffload.aio.setups import SETUPS  # noqa: PLC0415 - needs the native module

    return next(setup for setup in SETUPS if setup.engine == name).open()


def _aiofiles(reason: str) -> ChosenEngine:
    from zerooffload.aio.aiofiles_engine import AiofilesEngine  # noqa: PLC0415 - costs an import of asyncio

    return ChosenEngine(AiofilesEngine(), reason)
