"""A log of all that reaches a drive: an engine's writes and flushes, and the system's calls on names and lengths.

See `drive_images` for what a power cut leaves of it.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive_images import (
    BLOCK_BYTES,
    IGNORED,
    Begun,
    Committed,
    Done,
    Drive,
    Event,
    FileWrite,
    Finished,
    FlushBegun,
    FlushDone,
    Image,
    Met,
    Operation,
    Rename,
    Resize,
)

from zerooffload.aio import OpenFile
from zerooffload.errors import InternalError, TierIOError
from zerooffload.journal import Journal, StepRecord


class Log:
    """All that reaches the files below a folder, from now on; may be written to by several threads.

    Parameters
    ----------
    committed : int
        The step that the folder holds.
    num_ranks : int
        Whose files lie there; a step is committed when all of them have said so.

    Attributes
    ----------
    events : list[Event]
    drive : Drive
        As it is now, all of which counts as certain.
    """

    def __init__(self, root: Path, *, committed: int = 0, num_ranks: int = 1) -> None:
        self.root = root
        self.events: list[Event] = []
        self.start = Drive(committed=committed, finished=committed)
        self._num_ranks = num_ranks
        self._newest: dict[Path, int] = {}
        self._lock = threading.RLock()
        self._number = 0
        self._files: dict[str, int] = {}
        for name, content in Image.of(root).files.items():
            self.start.names[name] = None
            if content is not None:
                self.start.names[name] = self._new_file(name)
                self.start.files[self._files[name]] = content

    def drives(self) -> Iterator[Drive]:
        """One drive, as it is after each event; first as it was at the start."""
        start = self.start
        drive = Drive(dict(start.files), dict(start.names), committed=start.committed, finished=start.finished)
        yield drive
        for event in self.events:
            drive.apply(event)
            yield drive

    def drive_after(self, num_events: int) -> Drive:
        """The drive after so many events."""
        for number, drive in enumerate(self.drives()):
            if number == num_events:
                return drive
        raise InternalError("the log is not so long")

    def begin(self, operation: Operation) -> int:
        """An operation that may be on the drive from now on."""
        with self._lock:
            self._number += 1
            self.events.append(Begun(self._number, operation))
            return self._number

    def done(self, number: int) -> None:
        """It is known to be done."""
        with self._lock:
            self.events.append(Done(number))

    def happened(self, operation: Operation) -> None:
        """An operation that is done when its call returns."""
        self.done(self.begin(operation))

    def flush_begun(self, target: int | str) -> int:
        """Of a file or folder."""
        with self._lock:
            self._number += 1
            self.events.append(FlushBegun(self._number, target))
            return self._number

    def flush_done(self, number: int) -> None:
        """It has returned without an error."""
        with self._lock:
            self.events.append(FlushDone(number))

    def committed(self, step: int, directory: Path) -> None:
        """The journal of a rank says so."""
        if self.name_of(directory) is None:
            return
        with self._lock:
            self._newest[directory] = step
            if len(self._newest) == self._num_ranks:
                self.events.append(Committed(min(self._newest.values())))

    def finished(self, step: int) -> None:
        """The optimizer has returned."""
        with self._lock:
            self.events.append(Finished(step))

    def met(self, channel: str, number: int, is_over: bool) -> None:  # noqa: FBT001
        """See `rank_turns.Hear`."""
        with self._lock:
            self.events.append(Met(channel, number, is_over))

    def name_of(self, path: str | os.PathLike[str]) -> str | None:
        """Relative to the root; None for what is outside, or not logged."""
        absolute = os.path.realpath(os.fspath(path))
        root = os.path.realpath(self.root)
        if not absolute.startswith(root) or Path(absolute).name in IGNORED:
            return None
        name = os.path.relpath(absolute, root)
        return "" if name == "." else name

    def file_of(self, name: str) -> int:
        """The number of a file."""
        return self._files[name]

    def made(self, name: str, *, truncates: bool) -> None:
        """A file was opened such that it is there now."""
        with self._lock:
            if name not in self._files:
                self.happened(Rename(((name, self._new_file(name)),)))
            elif truncates:
                self.happened(Resize(self._files[name], 0, cuts=True))

    def removed(self, name: str) -> None:
        """A file or folder is gone."""
        with self._lock:
            self._files.pop(name, None)
            self.happened(Rename((), (name,)))

    def renamed(self, old: str, new: str) -> None:
        """A file has another name."""
        with self._lock:
            self._files[new] = self._files.pop(old)
            self.happened(Rename(((new, self._files[new]),), (old,)))

    def _new_file(self, name: str) -> int:
        self._number += 1
        self._files[name] = self._number
        return self._number


class _Ticket:
    """An operation that counts as done when somebody has waited for it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._is_done = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if not self._is_done:
                self._is_done = True
                self._finish()

    def done(self) -> bool:
        return self._is_done


class RecordingEngine:
    """Moves bytes from and to files, and logs; see `Engine`. Checks alignment, and that buffers are left alone."""

    name = "recording"
    reads_devices = False

    def __init__(self, log: Log) -> None:
        self._log = log

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> _Ticket:
        check_aligned(offset_bytes, target)
        moved = os.preadv(file.fd, [target.numpy().data], offset_bytes)
        if moved != target.numel():
            raise TierIOError("read", file.path, 5, offset_bytes=offset_bytes, length_bytes=target.numel())
        return _Ticket(lambda: None)

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> _Ticket:
        check_aligned(offset_bytes, source)
        content = source.numpy().tobytes()
        if os.pwritev(file.fd, [source.numpy().data], offset_bytes) != len(content):
            raise TierIOError("write", file.path, 5, offset_bytes=offset_bytes, length_bytes=len(content))
        name = self._log.name_of(file.path)
        number = None
        if name is not None:
            number = self._log.begin(FileWrite(self._log.file_of(name), offset_bytes, content))

        def finish() -> None:
            if source.numpy().tobytes() != content:
                raise InternalError(f"the buffer of a write to {file.path} was changed before it was done")
            if number is not None:
                self._log.done(number)

        return _Ticket(finish)

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """Memory is taken as it comes."""
        return False

    def submit_flush(self, file: OpenFile) -> _Ticket:
        name = self._log.name_of(file.path)
        if name is None:
            return _Ticket(lambda: None)
        number = self._log.flush_begun(self._log.file_of(name))
        return _Ticket(lambda: self._log.flush_done(number))

    def close(self) -> None:
        """Nothing is in flight."""


def check_aligned(offset_bytes: int, buffer: torch.Tensor) -> None:
    """What direct I/O needs, also where the file system does not."""
    if any(value % BLOCK_BYTES for value in (offset_bytes, buffer.numel(), buffer.data_ptr())) or not buffer.numel():
        raise InternalError(f"{buffer.numel()} bytes at {offset_bytes} are not fit for direct I/O")


@contextmanager
def recording(root: Path, *, committed: int = 0, num_ranks: int = 1) -> Iterator[Log]:
    """Log what is done to the files below `root` by the system's calls and by a `RecordingEngine` of the log."""
    log = Log(root, committed=committed, num_ranks=num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in _system_calls(log).items():
            patch.setattr(os, name, replacement)
        write = Journal.write

        def write_and_tell(journal: Journal, record: StepRecord) -> None:
            write(journal, record)
            log.committed(record.step, journal._directories[0])

        patch.setattr(Journal, "write", write_and_tell)
        yield log


def _system_calls(log: Log) -> dict[str, Callable[..., Any]]:
    """The calls that change files, each doing what it does and logging it."""
    really = {name: getattr(os, name) for name in ("open", "mkdir", "rmdir", "unlink", "replace", "fsync")}
    allocate = os.posix_fallocate

    def logged_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        fd: int = really["open"](path, flags, *args, **options)
        name = log.name_of(path) if isinstance(path, str | os.PathLike) else None
        if name and flags & os.O_CREAT:
            log.made(name, truncates=bool(flags & os.O_TRUNC))
        return fd

    def logged_mkdir(path: Any, *args: Any, **options: Any) -> None:
        really["mkdir"](path, *args, **options)
        if name := log.name_of(path):
            log.happened(Rename(((name, None),)))

    def logged_removal(call: str) -> Callable[..., None]:
        def remove(path: Any, *args: Any, **options: Any) -> None:
            really[call](path, *args, **options)
            if name := log.name_of(path):
                log.removed(name)

        return remove

    def logged_replace(source: Any, target: Any, **options: Any) -> None:
        really["replace"](source, target, **options)
        old, new = log.name_of(source), log.name_of(target)
        if old and new:
            log.renamed(old, new)

    def logged_fsync(fd: int) -> None:
        name = log.name_of(Path(f"/proc/self/fd/{fd}").readlink())
        if name is None:
            really["fsync"](fd)
            return
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            number = log.flush_begun(name)
        else:
            # What was written through a buffered stream: it reached the file by now.
            content = (log.root / name).read_bytes()
            if content:
                log.happened(FileWrite(log.file_of(name), 0, content))
            number = log.flush_begun(log.file_of(name))
        really["fsync"](fd)
        log.flush_done(number)

    def logged_allocate(fd: int, offset: int, nbytes: int) -> None:
        allocate(fd, offset, nbytes)
        if name := log.name_of(Path(f"/proc/self/fd/{fd}").readlink()):
            log.happened(Resize(log.file_of(name), offset + nbytes, cuts=False))

    return {
        "open": logged_open,
        "mkdir": logged_mkdir,
        "rmdir": logged_removal("rmdir"),
        "unlink": logged_removal("unlink"),
        "replace": logged_replace,
        "fsync": logged_fsync,
        "posix_fallocate": logged_allocate,
    }
