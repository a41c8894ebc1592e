"""The directory of ours in a user's nvme path: made, locked against a second run, and removed."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import stat
from contextlib import suppress
from pathlib import Path

from zerooffload.errors import ConfigError, TierIOError


def rank_directory(user_path: Path, rank: int) -> Path:
    """Where a rank's files lie in a user's folder."""
    return user_path / "zerooffload" / f"rank-{rank:05d}"


def rank_directories(user_path: Path) -> list[int]:
    """The ranks that have a directory in a user's folder."""
    found = (user_path / "zerooffload").glob("rank-*")
    return [int(number) for path in found if (number := path.name.removeprefix("rank-")).isdigit()]


class RunDirectory:
    """`<user's path>/zerooffload/rank-<rank>`, mode 0700, locked while it is open.

    The lock is the kernel's (flock), so a run that was killed leaves none behind. The file's text, the owner's process
    id and host, is for messages.

    Raises
    ------
    ConfigError
        If the user's path is no folder, cannot be written to, or another run holds the directory.
    """

    def __init__(self, user_path: Path, rank: int = 0) -> None:
        if not user_path.is_dir():
            raise ConfigError(f"nvme path {user_path} is not a folder: create it, or name one on the drive")
        self.path = rank_directory(user_path, rank)
        self._parent = self.path.parent
        self._lock_path = self.path / "lock"
        try:
            self._parent.mkdir(mode=0o700, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            for folder in (self._parent, self.path):
                _check_ours(folder)
            self._fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise ConfigError(f"nvme path {user_path} is not writable ({error.strerror}): name another") from error
            raise TierIOError("open", self.path, error.errno or errno.EIO) from error
        self._take_lock(user_path)

    def _take_lock(self, user_path: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            self._fd = -1
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise TierIOError("open", self._lock_path, error.errno or errno.EIO) from error
            raise ConfigError(
                f"nvme path {user_path} is in use by another run ({owner}): wait for it, end it with zo.close, or name"
                " another path"
            ) from error
        if not _is_still_there(self._fd, self._lock_path):
            # The run that held it removed it between our open and our lock.
            os.close(self._fd)
            self._fd = -1
            raise ConfigError(f"nvme path {user_path} was just released by another run: try again")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)

    @property
    def is_held(self) -> bool:
        """Whether what is at the path is this run's: not if it was removed, and perhaps made again by another run."""
        return self._fd >= 0 and _is_still_there(self._fd, self._lock_path)

    def close(self) -> None:
        """Remove the directory if it holds nothing but the lock, and unlock; again is harmless."""
        if self.is_held:
            # Fails if it holds more; or on a drive that is gone, or takes no writes any more.
            with suppress(OSError):
                self._lock_path.unlink()
                for folder in (self.path, self._parent):
                    folder.rmdir()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _check_ours(folder: Path) -> None:
    """Refuse a directory that somebody else put there: in a folder that all may write to it could lead anywhere."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{folder} is not a directory of this user's: remove it, or name another nvme path")


def _is_still_there(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False
