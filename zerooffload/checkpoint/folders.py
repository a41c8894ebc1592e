"""The checkpoints of a directory: how they are named, committed, found again and removed.

[Note: a checkpoint is committed by its name]
A save writes into `.save-<number>-step-<step>.part`. When every rank's files are durable, rank 0 renames it, which is
all that it takes to be a checkpoint: whatever ends a save before leaves the ones that were there, and a part that the
next save removes. Numbers count saves, so the newest is known even where training went back to an earlier step, and no
checkpoint ever takes the place of another.

[Note: files that are written over]
A drive may take new blocks of a file system more slowly than those that it has (half as fast where unused ones were
discarded, on a thinly provisioned drive), and giving many back takes time too. So a save takes over a folder that is
left over, and writes over its files; of the checkpoints that `keep_last` removes, one stays for that. Nobody else may
notice: not who has a file open, and would read a mix of both, nor who made a link to it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from zerooffload.aio.durable_names import flush_directory
from zerooffload.checkpoint.manifest import manifest_name
from zerooffload.errors import CheckpointError, ConfigError, TierIOError

_log = logging.getLogger("zerooffload")

_CHECKPOINT = re.compile(r"save-(\d{8})-step-(\d{8})")
_PART = re.compile(r"\.save-(\d{8})-step-(\d{8})\.part")
_OUR_FILE = re.compile(r"\.?rank-\d{5,}\.json(\.part)?|[a-z][a-z0-9_]*-\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True)
class CheckpointName:
    """Of the `number`-th save in a directory, after `step` steps."""

    number: int
    step: int

    @property
    def final(self) -> str:
        """Of the folder of a checkpoint."""
        return f"save-{self.number:08d}-step-{self.step:08d}"

    @property
    def part(self) -> str:
        """Of the folder while it is written, or removed."""
        return f".{self.final}.part"


def find_checkpoint(directory: Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest one in it.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    if _is_checkpoint(directory):
        return directory
    found = list_checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint: name the directory that was given to zo.save")
    return directory / found[-1].final


def holds_checkpoints(directory: Path) -> bool:
    """Whether `find_checkpoint` finds one."""
    return _is_checkpoint(directory) or bool(list_checkpoints(directory))


def list_checkpoints(directory: Path) -> list[CheckpointName]:
    """Those in a directory, oldest first."""
    return _names(directory, _CHECKPOINT)


class PartFolder:
    """The folder that a save writes to, made and held by rank 0: no other save takes it for a leftover.

    It may hold files of states, to be written over; see [Note: files that are written over].

    Parameters
    ----------
    num_ranks : int
        That save.

    Attributes
    ----------
    path : pathlib.Path
    name : CheckpointName

    Raises
    ------
    ConfigError
        If the directory cannot be used.
    """

    def __init__(self, directory: Path, step: int, num_ranks: int) -> None:
        self._fd = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            spare = _take_over(directory, num_ranks)
            if spare is not None:
                self._fd = spare[1]
            remove_leftovers(directory)
            others = [name for name in _names(directory, _PART) if spare is None or name != spare[0]]
            numbers = [name.number for name in (*list_checkpoints(directory), *others)]
            self._directory = directory
            self.name = CheckpointName(max(numbers, default=0) + 1, step)
            self.path = directory / self.name.part
            if spare is None:
                self.path.mkdir(mode=0o700)
                self._fd = lock_folder(self.path)
            else:
                (directory / spare[0].part).rename(self.path)
                # What is written over must not come back as a checkpoint.
                flush_directory(directory)
        except OSError as error:
            self.close()
            raise ConfigError(f"checkpoints cannot be saved in {directory}: {error.strerror}") from error

    def commit(self) -> Path:
        """Let it be a checkpoint, for good; its folder.

        Raises
        ------
        TierIOError
            If that fails: it may be one or not.
        """
        final = self._directory / self.name.final
        flush_directory(self.path)
        try:
            self.path.rename(final)
        except OSError as error:
            raise TierIOError("rename", self.path, error.errno or 0) from error
        flush_directory(self._directory)
        self.close()
        return final

    def keep_last(self, number: int) -> None:
        """Remove the oldest checkpoints of the directory, but for so many. What cannot be removed is told about.

        The last of them stays under its hidden name, for the next save or `remove_leftovers`.
        """
        for name in list_checkpoints(self._directory)[:-number]:
            try:
                (self._directory / name.final).rename(self._directory / name.part)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", self._directory / name.final, error.strerror)
        _remove_leftovers(_names(self._directory, _PART)[:-1], self._directory)

    def abandon(self) -> None:
        """Remove it, if it is not a checkpoint; again is harmless."""
        if self._fd >= 0:
            try:
                _remove(self.path)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        """Hold it no more; again is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed saves left behind, and checkpoints half removed; not what another run writes."""
    _remove_leftovers(_names(directory, _PART), directory)


def _remove_leftovers(names: Iterable[CheckpointName], directory: Path) -> None:
    for name in names:
        path = directory / name.part
        with suppress(OSError):
            fd = lock_folder(path)
            try:
                _remove(path)
            finally:
                os.close(fd)


def _is_checkpoint(directory: Path) -> bool:
    return (directory / manifest_name(0)).exists()


def _names(directory: Path, pattern: re.Pattern[str]) -> list[CheckpointName]:
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error
    found = [pattern.fullmatch(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
    names = [CheckpointName(int(match[1]), int(match[2])) for match in found if match is not None]
    return sorted(names, key=lambda name: name.number)


def lock_folder(folder: Path) -> int:
    """Hold a folder against other processes, until the descriptor is closed; raise `OSError` if one holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _take_over(directory: Path, num_ranks: int) -> tuple[CheckpointName, int] | None:
    """The newest leftover whose files may be written over, and the descriptor that holds it."""
    for name in reversed(_names(directory, _PART)):
        with suppress(OSError):
            fd = lock_folder(directory / name.part)
            with ExitStack() as held:
                held.callback(os.close, fd)
                if _has_only_spares(directory / name.part, num_ranks):
                    held.pop_all()
                    return name, fd
    return None


def _has_only_spares(folder: Path, num_ranks: int) -> bool:
    """Whether files that may be written over are all that a folder holds, once our other ones are removed."""
    left = []
    for path in folder.iterdir():
        if not _OUR_FILE.fullmatch(path.name):
            return False
        if path.name.endswith(f"-of-{num_ranks:05d}.safetensors") and _may_write_over(path):
            left.append(path)
        else:
            path.unlink()
    return bool(left)


def _may_write_over(path: Path) -> bool:
    """Whether a file is ours alone. A file system that another machine may have mounted cannot tell."""
    with suppress(OSError), ExitStack() as held:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        held.callback(os.close, fd)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and os.major(status.st_dev):
            # Given only where nobody else has it open or mapped.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return True
    return False


def _remove(folder: Path) -> None:
    """Remove our files in a folder, and the folder if nothing else is in it."""
    for path in folder.iterdir():
        if _OUR_FILE.fullmatch(path.name) and (path.is_symlink() or not path.is_dir()):
            path.unlink()
    try:
        folder.rmdir()
    except OSError as error:
        _log.warning("%s is left where it is: %s", folder, error.strerror)
