"""The nvme tier: a few preallocated files, one a path, opened once."""

from __future__ import annotations

from pathlib import Path

import torch

from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.files import create_file, reserve_space
from zerooffload.config import TierName
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Link, Recorder, Waitable
from zerooffload.tiers.directory import RunDirectory
from zerooffload.tiers.records import RecordLayout


class NvmeBlock:
    """Records on files; see `Block`. Chunk `i` has an extent of its own, so chunks may lie on different paths."""

    def __init__(self, layout: RecordLayout, extents: list[tuple[OpenFile, int]], tier: NvmeTier) -> None:
        self.layout = layout
        self._extents = extents
        self._tier = tier

    def view(self, space: object, chunk: int) -> None:
        """No space can address a file."""

    def whole(self, space: object) -> None:
        """No space can address a file."""

    def read(self, chunk: int, target: torch.Tensor) -> Waitable:
        """One read of the record."""
        file, offset = self._extents[chunk]
        self._tier.recorder.moved(Link.NVME_READ, target.numel())
        return self._tier.engine.submit_read(file, offset, target)

    def write(self, chunk: int, source: torch.Tensor) -> Waitable:
        """One write of the record."""
        file, offset = self._extents[chunk]
        self._tier.recorder.moved(Link.NVME_WRITTEN, source.numel())
        return self._tier.engine.submit_write(file, offset, source)


class NvmeTier:
    """Files in a directory of ours on each path; each chunk goes to the path that holds least so far. See `Tier`.

    Parameters
    ----------
    paths : tuple[pathlib.Path, ...]
        Folders of the user.
    rank : int
        Each rank has a directory of its own.

    Raises
    ------
    ConfigError
        If a path is missing, not writable, or in use by another run.
    """

    def __init__(
        self, paths: tuple[Path, ...], budget: Budget, engine: Engine, recorder: Recorder, rank: int = 0
    ) -> None:
        self.name = TierName.NVME
        self.budget = budget
        self.engine = engine
        self.recorder = recorder
        self._directories: list[RunDirectory] = []
        self._files: list[OpenFile] = []
        self._used_bytes = [0] * len(paths)
        self._leases: list[Lease] = []
        try:
            for path in paths:
                directory = RunDirectory(path, rank)
                self._directories.append(directory)
                self._files.append(create_file(directory.path / "states.bin"))
        except BaseException:
            self.close()
            raise

    def block_nbytes(self, layout: RecordLayout) -> int:
        """Records, each padded to the file's alignment."""
        return layout.total_file_nbytes

    def allocate(self, layout: RecordLayout, holder: str) -> NvmeBlock:
        """Extents for all records."""
        self._leases.append(self.budget.lease(self.block_nbytes(layout), holder))
        extents = []
        for chunk in range(layout.num_chunks):
            least = self._used_bytes.index(min(self._used_bytes))
            extents.append((self._files[least], self._used_bytes[least]))
            self._used_bytes[least] += layout.file_nbytes(chunk)
        return NvmeBlock(layout, extents, self)

    def reserve(self) -> None:
        """Give every file its length; the disk being full is known here."""
        for file, nbytes in zip(self._files, self._used_bytes, strict=True):
            reserve_space(file, nbytes)

    def close(self) -> None:
        """Finish I/O, delete the files, unlock the directories; again is harmless."""
        self.engine.close()
        for file in self._files:
            file.close()
            file.path.unlink(missing_ok=True)
        for directory in self._directories:
            directory.close()
        for lease in self._leases:
            lease.release()
        self._files, self._directories, self._leases = [], [], []
