"""Which engine moves the bytes, and why."""

from __future__ import annotations

from dataclasses import dataclass

from zerooffload import native
from zerooffload.aio.api import Engine
from zerooffload.errors import ConfigError


@dataclass(frozen=True)
class ChosenEngine:
    """An engine and the reason for it."""

    engine: Engine
    reason: str


def choose_engine(name: str = "auto") -> ChosenEngine:
    """The engine of that name, or for "auto" the fastest that works here.

    Raises
    ------
    ConfigError
        If an engine forced by name cannot work here: it never falls back.
    """
    if name not in ("auto", "threads", "aiofiles"):
        raise ConfigError(f"unknown I/O engine {name!r}: expected auto, threads or aiofiles")
    if name == "aiofiles":
        return _aiofiles("forced by name")
    if native.available:
        from zerooffload.aio.threads import ThreadsEngine  # noqa: PLC0415 - needs the native module

        return ChosenEngine(ThreadsEngine(), "forced by name" if name == "threads" else "the native module is there")
    why = f"no native module: {native.why_unavailable}"
    if name == "threads":
        raise ConfigError(f"the I/O engine 'threads' was forced, but cannot work: {why}. Use 'auto' or 'aiofiles'.")
    return _aiofiles(why)


def _aiofiles(reason: str) -> ChosenEngine:
    from zerooffload.aio.aiofiles_engine import AiofilesEngine  # noqa: PLC0415 - costs an import of asyncio

    return ChosenEngine(AiofilesEngine(), reason)
