"""A rank's part of a checkpoint: its files, written chunk by chunk in any order, then its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zerooffload.accelerator import Accelerator
from zerooffload.aio import Engine
from zerooffload.aio.durable_names import write_durably
from zerooffload.checkpoint.manifest import Manifest, manifest_name
from zerooffload.checkpoint.page_writer import NUM_BLOCKS, PageWriter, Stored, block_nbytes
from zerooffload.checkpoint.shard_files import ShardFile, file_name, plan_files
from zerooffload.errors import InternalError
from zerooffload.memory import Budget
from zerooffload.telemetry import Wait, Waitable, Waits, wait_for_all
from zerooffload.tiers import FILE_ALIGNMENT_BYTES, StagingRing

HOLDER = "writes of checkpoints"
"""Who leases the ring."""


class ShardWriter:
    """Writes into a folder that is there.

    Parameters
    ----------
    manifest : Manifest
        Its checksums are what is left to find out: any may stand there.
    budget : Budget
        The host's; `NUM_BLOCKS` blocks are leased from it: see `block_nbytes`.

    Raises
    ------
    ConfigError
        If the manifest is too long.
    BudgetError
        If the blocks do not fit.
    TierIOError
        If a file cannot be made, or its space is not there.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        engine: Engine,
        *,
        waits: Waits,
        budget: Budget,
        accelerator: Accelerator,
    ) -> None:
        # Too long, it is refused before anything is written.
        manifest.encode()
        self._folder = folder
        self._manifest = manifest
        self._waits = waits
        self._files = plan_files(manifest, str(folder))
        self._headers = {state: _bytes(file.header.encode(FILE_ALIGNMENT_BYTES)) for state, file in self._files.items()}
        self._checksums: dict[int, dict[str, str]] = {}
        self._writers: dict[str, PageWriter] = {}
        # All of them, so that one that failed is told of whoever waited for it before.
        self._leaving: list[Waitable] = []
        longest = max((_longest(file) for file in self._files.values()), default=0)
        self._ring = StagingRing(HOLDER, NUM_BLOCKS, block_nbytes(longest), budget, accelerator)
        try:
            self._remove_others()
            for state, file in self._files.items():
                nbytes = self._headers[state].numel() + file.header.data_nbytes
                writer = PageWriter(folder / file.name, nbytes, engine, self._ring, waits)
                self._writers[state] = writer
                self._leaving += writer.write(0, [self._headers[state]]).leaving
        except BaseException:
            self.close()
            raise

    def write(
        self, chunk: int, states: Mapping[str, Sequence[torch.Tensor]], stored: Mapping[str, Stored] | None = None
    ) -> list[Waitable]:
        """Write a chunk: of each of its states, its segments' items, 1D; the writes that still read them.

        Parameters
        ----------
        stored : Mapping[str, Stored], optional
            Where the items lie in other files, by state.

        Raises
        ------
        TierIOError
            If an earlier write failed.
        """
        self._checksums[chunk] = {}
        leaving: list[Waitable] = []
        for state, segments in states.items():
            place = self._files[state].ranges[chunk]
            sources = [segment.view(torch.uint8) for segment in segments]
            if sum(source.numel() for source in sources) != place.nbytes:
                raise InternalError(f"{self._files[state].name}: chunk {chunk} is not as long as was planned")
            offset = self._headers[state].numel() + place.offset_bytes
            written = self._writers[state].write(offset, sources, (stored or {}).get(state))
            self._checksums[chunk][state] = written.checksum
            leaving += written.leaving
        self._leaving += leaving
        return leaving

    def finish(self) -> None:
        """Make the files durable, then the manifest.

        Raises
        ------
        TierIOError
            If that fails.
        """
        self._wait_until_written()
        for writer in self._writers.values():
            writer.finish()
        chunks = tuple(
            replace(chunk, checksums=self._checksums[number]) for number, chunk in enumerate(self._manifest.chunks)
        )
        content = replace(self._manifest, chunks=chunks).encode()
        write_durably(self._folder / manifest_name(self._manifest.rank), content)

    def close(self) -> None:
        """Close the files and give the memory back, once nothing is on its way; again is harmless.

        Raises
        ------
        TierIOError
            If a write failed.
        """
        try:
            self._wait_until_written()
        finally:
            for writer in self._writers.values():
                writer.close()
            self._ring.close()

    def _wait_until_written(self) -> None:
        try:
            wait_for_all(self._waits, Wait.STATE_WRITE, self._leaving)
        finally:
            self._ring.drain(self._waits)

    def _remove_others(self) -> None:
        """Of this rank's files that are there to be written over, those that are not in this save."""
        names = {file.name for file in self._files.values()}
        for path in self._folder.glob(file_name("*", self._manifest.rank, self._manifest.num_ranks)):
            if path.name not in names:
                path.unlink()


def _longest(file: ShardFile) -> int:
    return max((place.nbytes for place in file.ranges.values()), default=0)


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
