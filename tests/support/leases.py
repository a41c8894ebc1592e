"""Whether a file system of the tests can tell who has a file open."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest


def pretend_drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder in memory, or on layers, count as one on a drive; skip where its files take no leases."""
    path = folder / "probe"
    path.touch()
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"files of the tests take no leases: {error}")
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    path.unlink()
    monkeypatch.setattr("zerooffload.checkpoint.folders.os.major", lambda _: 1)
