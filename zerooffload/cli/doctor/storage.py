"""Findings about folders for the nvme tier. Nothing is left in them."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerooffload.accelerator import default_accelerator, populated_pages
from zerooffload.aio import Engine, choose_engine
from zerooffload.aio.files import create_file
from zerooffload.aio.uring import UringEngine
from zerooffload.cli.doctor.finding import Finding, Verdict
from zerooffload.errors import TierIOError
from zerooffload.formats import GIB, MIB, format_bytes
from zerooffload.machine import drive_model, file_system, rotates

_BLOCK_BYTES = 4096
_RING_BYTES = 48 * MIB
"""What a run's staging ring takes, and wants registered."""
_LITTLE_SPACE_BYTES = 24 * GIB
"""A billion parameters."""
_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre")


def storage_findings(path: Path) -> Iterator[Finding]:
    """Whether the folder is there and writable, takes direct I/O, what it is on, what is free, how fast it is."""
    subject = f"nvme path {path}"
    if not path.is_dir():
        yield Finding(subject, "not a folder", Verdict.PROBLEM, "create it, or name one on the drive")
        return
    yield _file_system(subject, path)
    yield Finding(f"{subject}: drive", drive_model(path))
    yield _space(f"{subject}: space", path)
    writing = _direct_io(f"{subject}: writing", path)
    yield writing
    if writing.verdict is not Verdict.PROBLEM:
        yield _engine(f"{subject}: engine", path)


def _file_system(subject: str, path: Path) -> Finding:
    kind, device = file_system(path)
    value = f"{kind} on {device}"
    if kind in _IN_MEMORY:
        return Finding(subject, value, Verdict.NOTE, "this is host memory, not a drive: name a folder on a drive")
    if kind in _REMOTE:
        return Finding(subject, value, Verdict.NOTE, "this is a network's file system: a local drive is faster")
    if rotates(path):
        advice = (
            "the drive says that it rotates, as virtual ones often do; if it is true, a solid-state drive is faster"
        )
        return Finding(subject, value, Verdict.NOTE, advice)
    return Finding(subject, value)


def _space(subject: str, path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    if free < _LITTLE_SPACE_BYTES:
        advice = "states with committed steps take 24 bytes a parameter: free space, or name another folder"
        return Finding(subject, f"{format_bytes(free)} free", Verdict.NOTE, advice)
    return Finding(subject, f"{format_bytes(free)} free")


def _direct_io(subject: str, path: Path) -> Finding:
    """Write one block the way that the tier does."""
    try:
        with tempfile.TemporaryDirectory(prefix=".zerooffload-doctor-", dir=path) as folder, _quiet():
            file = create_file(Path(folder) / "probe")
            try:
                with mmap.mmap(-1, _BLOCK_BYTES) as block:
                    os.pwrite(file.fd, block, 0)
            finally:
                file.close()
    except (OSError, TierIOError) as error:
        reason = error.strerror or str(error)
        return Finding(subject, f"failed: {reason}", Verdict.PROBLEM, "make it writable, or name another folder")
    if not file.direct:
        advice = "buffered I/O is used: slower, and it fills the page cache; a folder on ext4 or xfs takes O_DIRECT"
        return Finding(subject, "works, but the file system refuses O_DIRECT", Verdict.NOTE, advice)
    return Finding(subject, "works with O_DIRECT")


def _engine(subject: str, path: Path) -> Finding:
    """Measured now, which also corrects what runs remember of the drive."""
    chosen = choose_engine("auto", path, measure_again=True, device=default_accelerator())
    try:
        return Finding(subject, f"{chosen.engine.name}: {chosen.reason}{_registration(chosen.engine)}")
    finally:
        chosen.engine.close()


def _registration(engine: Engine) -> str:
    if not isinstance(engine, UringEngine):
        return ""
    size = format_bytes(_RING_BYTES)
    if engine.register(populated_pages(_RING_BYTES)):
        return f"; {size} of memory could be registered"
    return f"; {size} of memory could not be registered, which costs little: {engine.why_unregistered}"


@contextmanager
def _quiet() -> Iterator[None]:
    """The finding says what the fallback's warning would."""
    log = logging.getLogger("zerooffload")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
