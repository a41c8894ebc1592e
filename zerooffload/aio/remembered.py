"""What was measured on a drive, kept for later starts in a file that may be lost or broken at any time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerooffload import __version__
from zerooffload.aio.setups import SETUPS, Setup
from zerooffload.machine import cache_folder, write_whole

_MOST_DRIVES = 64


def recall(folder: Path) -> dict[Setup, float] | None:
    """Bytes a second of each setup on the folder's drive; None if it is not known."""
    return _rates(_contents().get(_drive(folder)))


def remember(folder: Path, rates: Mapping[Setup, float]) -> None:
    """Keep what was measured; silently not, where the cache folder cannot be written."""
    contents = _contents()
    drive = _drive(folder)
    contents.pop(drive, None)
    contents[drive] = {_name(setup): rate for setup, rate in rates.items()}
    while len(contents) > _MOST_DRIVES:
        del contents[next(iter(contents))]
    file = _file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, json.dumps(contents), mode=0o600)


def _file() -> Path:
    return cache_folder() / "io_engines.json"


def _drive(folder: Path) -> str:
    """The folder's device and file system, for this kernel and this version of ours."""
    return f"{folder.stat().st_dev} {os.statvfs(folder).f_fsid} {platform.release()} {__version__}"


def _name(setup: Setup) -> str:
    return f"{setup.engine} {setup.depth} {setup.piece_bytes}"


def _contents() -> dict[str, Any]:
    try:
        contents = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def _rates(entry: object) -> dict[Setup, float] | None:
    if not isinstance(entry, dict) or not all(isinstance(rate, float) and rate > 0 for rate in entry.values()):
        return None
    named = {_name(setup): setup for setup in SETUPS}
    if not set(entry) <= set(named):
        return None
    return {named[name]: rate for name, rate in entry.items()}
