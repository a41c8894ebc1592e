"""A folder that has its name when it is whole, and not before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from zerooffload.aio.durable_names import flush_directory
from zerooffload.checkpoint.folders import lock_folder
from zerooffload.errors import CheckpointError, ConfigError


class StagedFolder:
    """Filled under a hidden name beside its own, on one file system, and renamed in the end.

    The hidden folder of a process that was killed is taken over by the next one with the same directory; while its
    owner lives, a lock that the kernel drops keeps others out.

    Parameters
    ----------
    directory : pathlib.Path
        That there will be; its parent exists.
    replace : bool
        Also where there is a model folder already: it goes when the new one is whole.

    Attributes
    ----------
    path : pathlib.Path
        Where to put the files.

    Raises
    ------
    ConfigError
        If the directory cannot be made, or holds files that are not to be replaced.
    """

    def __init__(self, directory: Path, *, replace: bool = False) -> None:
        # A link would be replaced, and not the folder it leads to.
        self._directory = directory.expanduser().resolve()
        self.path = self._directory.with_name(f".{self._directory.name}.partial")
        self._replaced = self._directory.with_name(f".{self._directory.name}.replaced")
        self._replaces = replace
        self._lock = -1
        self._check()

    def create(self) -> None:
        """Make the folder, empty.

        Raises
        ------
        ConfigError
            If another process is filling it.
        CheckpointError
            If it cannot be made.
        """
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = lock_folder(self.path)
        except BlockingIOError as error:
            raise ConfigError(f"another process is writing {self._directory}: wait for it, or name another") from error
        except OSError as error:
            raise CheckpointError(f"cannot make {self.path}: {error.strerror}") from error
        _clear(self.path)
        if self._replaced.is_dir() and not self._directory.exists():
            # Somebody was killed between the renames of `commit`.
            self._replaced.rename(self._directory)

    def commit(self) -> None:
        """Flush what names the files, and give the folder its own name.

        Raises
        ------
        CheckpointError
            If that fails; the folder is as it was then.
        """
        try:
            flush_directory(self.path)
            if self._replaces and self._directory.exists():
                shutil.rmtree(self._replaced, ignore_errors=True)
                self._directory.rename(self._replaced)
            self.path.rename(self._directory)
            flush_directory(self._directory.parent)
        except OSError as error:
            if not self._directory.exists() and self._replaced.exists():
                self._replaced.rename(self._directory)
            raise CheckpointError(f"cannot make {self._directory}: {error.strerror}") from error
        shutil.rmtree(self._replaced, ignore_errors=True)
        self._unlock()

    def discard(self) -> None:
        """Remove what was made; after `commit` or without `create` nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _check(self) -> None:
        parent = self._directory.parent
        if not parent.is_dir():
            raise ConfigError(f"cannot make {self._directory}: {parent} is not a folder")
        if not self._directory.exists():
            return
        if not self._directory.is_dir():
            raise ConfigError(f"{self._directory} is a file: name a folder that is new or empty")
        names = {path.name for path in self._directory.iterdir()}
        if names and not self._replaces:
            raise ConfigError(f"{self._directory} holds files: name a folder that is new or empty, or overwrite it")
        if names and not any(name.endswith(".safetensors") for name in names):
            raise ConfigError(f"{self._directory} holds files, but no weights: it is not replaced, name another")

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
