"""Writing the journal: a record is written when what it names is durable, and counts when it is durable itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zerooffload.accelerator import populated_pages
from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.durable_names import flush_directory, write_durably
from zerooffload.aio.files import create_file, open_file, reserve_space
from zerooffload.errors import TierIOError
from zerooffload.formats import KIB, round_up
from zerooffload.journal.history import NUM_RECORDS, record_path
from zerooffload.journal.manifest import MANIFEST_FILE, Manifest
from zerooffload.journal.record import StepRecord, fixed_nbytes
from zerooffload.tiers import FILE_ALIGNMENT_BYTES

_STATE_NBYTES = 128 * KIB
"""Room for the JSON of a record: random states take some 20 KiB."""


def record_capacity(num_chunks: int) -> int:
    """Bytes that are reserved for a record, on the drive and in host memory."""
    return round_up(fixed_nbytes(num_chunks) + _STATE_NBYTES, FILE_ALIGNMENT_BYTES)


class Journal:
    """The two record files of a rank.

    [Note: flush, record, flush]
    A record may reach the drive before what it names, and only half of it may: so the states are flushed first, and the
    record is believed only if its checksum is right. The file that is overwritten is that of the commit before the
    last, which nobody needs any more: the last one is committed on every rank.

    Parameters
    ----------
    directories : Sequence[pathlib.Path]
        Of this rank; the records are in the one with the first path.
    state_files : Sequence[OpenFile]
        Flushed before each record.
    is_new : bool
        Make the files; otherwise they are there, but for one that was lost: the other holds what is continued.

    Raises
    ------
    TierIOError
        If they cannot be made or opened.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        engine: Engine,
        state_files: Sequence[OpenFile],
        num_chunks: int,
        *,
        is_new: bool,
    ) -> None:
        self._directories = list(directories)
        self._engine = engine
        self._state_files = list(state_files)
        self._buffer = populated_pages(record_capacity(num_chunks))
        self._files: list[OpenFile] = []
        try:
            for turn in range(NUM_RECORDS):
                path = record_path(self._directories[0], turn)
                is_there = not is_new and path.exists()
                self._files.append(open_file(path) if is_there else create_file(path))
                if is_new:
                    reserve_space(self._files[-1], self._buffer.numel())
                elif not is_there:
                    flush_directory(path.parent)
        except BaseException:
            self.close()
            if is_new:
                forget_run(self._directories)
            raise

    def begin(self, manifest: Manifest, record: StepRecord) -> None:
        """Commit the initial states; until the manifests are there too, there is no run.

        Raises
        ------
        TierIOError
            If that fails.
        """
        # All bytes of the other file are zeros, as of one that was never used.
        self._write(record.sequence + 1, b"")
        self.flush_states()
        self.write(record)
        for directory in self._directories:
            # A manifest must not be there without what it names.
            _flush_names(directory)
        for path, directory in reversed(list(enumerate(self._directories))):
            write_durably(directory / MANIFEST_FILE, replace(manifest, path=path).encode())

    def flush_states(self) -> None:
        """Make every write of states that is done durable.

        Raises
        ------
        TierIOError
            If that fails.
        """
        for file in self._state_files:
            _check_there(file)
        for flush in [self._engine.submit_flush(file) for file in self._state_files]:
            flush.wait()

    def write(self, record: StepRecord) -> None:
        """Commit a step whose states are durable: it counts when this returns.

        Raises
        ------
        TierIOError
            If that fails: the step before is still there.
        """
        self._write(record.sequence, record.encode())

    def give_up_after(self, sequence: int) -> None:
        """Make sure that the commit behind `sequence`, which not every rank has, is never believed again.

        Raises
        ------
        TierIOError
            If that fails.
        """
        self._write(sequence + 1, b"")

    def close(self) -> None:
        """Close the files; again is harmless."""
        for file in self._files:
            file.close()
        self._files = []

    def _write(self, sequence: int, content: bytes) -> None:
        file = self._files[sequence % NUM_RECORDS]
        _check_there(file)
        length = os.fstat(file.fd).st_size
        # Also of a file that somebody cut.
        nbytes = round_up(max(len(content), length, self._buffer.numel()), FILE_ALIGNMENT_BYTES)
        if nbytes > length:
            reserve_space(file, nbytes)
        if nbytes > self._buffer.numel():
            self._buffer = populated_pages(nbytes)
        source = self._buffer[:nbytes]
        source.zero_()
        if content:
            source[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._engine.submit_write(file, 0, source).wait()
        self._engine.submit_flush(file).wait()


def _check_there(file: OpenFile) -> None:
    """See that what is written can be found again."""
    if not os.fstat(file.fd).st_nlink:
        raise TierIOError(
            "write", file.path, errno.ENOENT, advice="It was removed, so nobody can resume from it: start again."
        )


def forget_run(directories: Sequence[Path]) -> None:
    """Let a run never have been: its manifests first, so that its records name nothing any more.

    Raises
    ------
    TierIOError
        If a file cannot be removed.
    """
    manifests = [[directory / MANIFEST_FILE] for directory in directories]
    records = [[record_path(directory, turn) for turn in range(NUM_RECORDS)] for directory in directories]
    for paths in (*manifests, *records):
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise TierIOError("remove", path, error.errno or 0) from error
        flush_directory(paths[0].parent)


def _flush_names(directory: Path) -> None:
    """Make a rank's directory durable, and the names in it: it and its parent may just have been made."""
    for folder in (directory, *directory.parents[:2]):
        flush_directory(folder)
