"""How fast a path of the nvme tier is, as a run uses it: its engine, its buffers, its transfers."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zerooffload.aio import choose_engine
from zerooffload.aio.traffic import Mix, Traffic
from zerooffload.calibration.effort import Effort
from zerooffload.calibration.turns import Figure
from zerooffload.errors import ConfigError
from zerooffload.formats import MIB, format_bytes
from zerooffload.machine import drive_model
from zerooffload.planner.placement import NUM_STAGING_SLOTS

BUFFER_BYTES = NUM_STAGING_SLOTS * 16 * MIB
"""Of memory for a drive."""
_EXTENT_BYTES = 16 * MIB
"""Records of a run are 8 to 24 MiB."""
_FREE_PARTS = 4
"""The file takes no more than one of them, of what is free."""
_LEAST_EXTENTS = 8
_READS, _WRITES = Mix(1, 0), Mix(0, 1)
_MIXES = (Mix(1, 3), Mix(1, 1), Mix(3, 1))
_SUSTAINED_SLICES = 16


def check_paths(paths: Sequence[Path]) -> None:
    """See that each path can be measured.

    Raises
    ------
    ConfigError
        If one is no folder, has too little space, or is on the file system of another.
    """
    seen: dict[int, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"cannot measure {path}: not a folder. Create it, or name one on the drive.")
        other = seen.setdefault(path.stat().st_dev, path)
        if other is not path:
            raise ConfigError(
                f"{other} and {path} are on one file system: it would count twice. Name one folder on each drive."
            )
        free, wanted = shutil.disk_usage(path).free, _FREE_PARTS * _LEAST_EXTENTS * _EXTENT_BYTES
        if free < wanted:
            raise ConfigError(
                f"cannot measure {path}: {format_bytes(free)} free, {format_bytes(wanted)} needed. Free space, or name"
                " another folder."
            )


class MeasuredDrive:
    """A path with a scratch file that is written once. It has no name; nothing is left of it.

    Raises
    ------
    ConfigError
        If no file can be made there, or the file system has no direct I/O.
    """

    def __init__(self, path: Path, effort: Effort) -> None:
        self._path = path
        self._space_bytes = shutil.disk_usage(path).free
        self._effort = effort
        with ExitStack() as opened:
            try:
                self._traffic = Traffic(path, NUM_STAGING_SLOTS, _EXTENT_BYTES)
            except OSError as error:
                raise ConfigError(f"cannot measure {path}: {_reason(error)}") from error
            opened.callback(self._traffic.close)
            self._engine = choose_engine("auto", path, measure_again=True).engine
            opened.callback(self._engine.close)
            self._traffic.register(self._engine)
            file_bytes = min(effort.file_bytes, self._space_bytes // _FREE_PARTS)
            self._traffic.fill(self._engine, file_bytes // _EXTENT_BYTES, effort.fill_seconds)
            self._traffic.flush(self._engine)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def facts(self) -> dict[str, Any]:
        """The fields of `Drive` that take no time."""
        mixed = [{"read_part": mix.reads / (mix.reads + mix.writes)} for mix in _MIXES]
        return {
            "path": str(self._path.resolve()),
            "name": drive_model(self._path),
            "space": self._space_bytes,
            "mixed": mixed,
        }

    def figures(self, name: str) -> Iterator[Figure]:
        """Reads and writes alone, and together; `name` is the drive's in the profile."""
        mixes = {"read": _READS, "write": _WRITES, **{f"mixed.{number}.rate": mix for number, mix in enumerate(_MIXES)}}
        for field, mix in mixes.items():
            yield Figure(f"{name}.{field}", partial(self._turn, mix), self._effort.drive_turn_seconds)

    def sustained_writes(self) -> list[float]:
        """Bytes a second in parts of the second half of a time in which nothing but writes went on."""
        seconds = self._effort.sustained_seconds / _SUSTAINED_SLICES
        return [self._turn(_WRITES, seconds) for _ in range(_SUSTAINED_SLICES)][_SUSTAINED_SLICES // 2 :]

    def _turn(self, mix: Mix, seconds: float) -> float:
        start = time.perf_counter()
        moved_bytes = self._traffic.move(self._engine, mix, seconds)
        if mix.writes:
            # As each step of a run ends: what is still in the drive's own memory is not written.
            self._traffic.flush(self._engine)
        return moved_bytes / (time.perf_counter() - start)


def _reason(error: OSError) -> str:
    if error.errno == errno.EINVAL:
        return (
            "the file system refuses direct I/O, so that a file there tells of memory and not of a drive. Name a folder"
            " on ext4 or xfs, or write the drive's speeds into the profile by hand."
        )
    return f"{error.strerror}. Make it writable, or name another folder."
