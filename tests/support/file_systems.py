"""Small file systems of their own for tests: mounted for a while, and filled, broken or taken away meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_FILLER = "filler"
_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, and below what it does with the log."""
_WITHOUT_FLUSHING = 2


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system, with a folder in it that is a user's nvme path.

    Attributes
    ----------
    device : str
        "" for one in memory.
    """

    mount_point: Path
    device: str = ""

    @property
    def folder(self) -> Path:
        """The user's."""
        return self.mount_point / "nvme"

    @property
    def free_bytes(self) -> int:
        """What anybody can still write."""
        return shutil.disk_usage(self.mount_point).free

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Take what is free, but for so much."""
        with (self.mount_point / _FILLER).open("wb") as filler:
            piece, length = 1 << 20, 0
            while piece >= 4096 and self.free_bytes - leave_bytes >= 4096:
                try:
                    os.posix_fallocate(filler.fileno(), length, min(piece, self.free_bytes - leave_bytes) & -4096)
                    length = os.fstat(filler.fileno()).st_size
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2

    def free(self) -> None:
        """Give back what `fill` took."""
        (self.mount_point / _FILLER).unlink()

    def fail(self) -> None:
        """Let ext4 find an error, after which it takes no more writes."""
        Path("/sys/fs/ext4", Path(self.device).name, "trigger_fs_error").write_text("test", encoding="ascii")

    def vanish(self) -> None:
        """Let the drive be gone; what was not flushed is lost."""
        fd = os.open(self.mount_point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING))
        finally:
            os.close(fd)

    def remount(self, options: str) -> None:
        """With other options."""
        _run("mount", "-o", f"remount,{options}", str(self.mount_point))

    def mount_again(self) -> None:
        """As after a restart of the machine. Fails while a file is open."""
        _run("umount", str(self.mount_point))
        _run("mount", "-o", "errors=remount-ro", self.device, str(self.mount_point))


@contextmanager
def mounted(kind: str, nbytes: int) -> Iterator[FileSystem]:
    """A file system of that size: "tmpfs" or "ext4"."""
    with TemporaryDirectory() as base:
        mount_point = Path(base, "mounted")
        mount_point.mkdir()
        if kind == "tmpfs":
            device, what = "", ["-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs"]
        else:
            device = _ext4_device(Path(base, "image"), nbytes)
            what = ["-o", "errors=remount-ro", device]
        try:
            _run("mount", *what, str(mount_point))
            try:
                made = FileSystem(mount_point, device)
                made.folder.mkdir()
                yield made
            finally:
                _run("umount", str(mount_point), otherwise=["umount", "-l", str(mount_point)])
        finally:
            if device:
                _run("losetup", "-d", device)


@cache
def why_none(kind: str) -> str:
    """Why such a file system cannot be mounted here; "" if it can."""
    try:
        with mounted(kind, 16 << 20):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{kind} cannot be mounted: {(getattr(error, 'stderr', None) or str(error)).strip()}"


def _ext4_device(image: Path, nbytes: int) -> str:
    with image.open("wb") as file:
        file.truncate(nbytes)
    # No reserve for root, and nothing that the kernel would still write in its own time.
    now = "lazy_itable_init=0,lazy_journal_init=0"
    _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-N", "64", "-E", now, str(image))
    return _run("losetup", "--find", "--show", str(image)).strip()


def _run(*command: str, otherwise: list[str] | None = None) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except subprocess.CalledProcessError:
        if otherwise is not None:
            subprocess.run(otherwise, check=True, timeout=60)
        raise
