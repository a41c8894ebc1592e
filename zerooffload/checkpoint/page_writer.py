"""A file whose bytes are written in any order, in whole pages, past the page cache.

[Note: written in place]
Whole pages that lie in memory as they do in the file, from the start of a page on, go out from where they are; whoever
has them leaves them as they are meanwhile. All else is copied to where it is aligned: parts of pages, short runs, and
what lies otherwise, since what comes before it in the file has not the length of whole pages. What a file holds already
is not written but shared with it, run by run, where the file system can.

[Note: pages that are shared]
Direct I/O moves whole pages of the file. A page on which two writes meet is kept in memory until all its bytes are
there, and goes out with the write that completes it: one page for each end of what is written already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.cloning import clone_range
from zerooffload.aio.files import open_or_create, reserve_space
from zerooffload.errors import InternalError, TierIOError
from zerooffload.formats import MIB, round_up
from zerooffload.telemetry import Waitable, Waits
from zerooffload.tiers import FILE_ALIGNMENT_BYTES as PAGE_BYTES
from zerooffload.tiers import StagingRing

BLOCK_BYTES = 4 * MIB
"""Of a write at the most; a slot of the ring."""
NUM_BLOCKS = 4
"""That are on their way at once."""
LEAST_IN_PLACE_BYTES = MIB
"""What is shorter is copied: many small writes take longer."""


def block_nbytes(longest_nbytes: int) -> int:
    """Of a slot of the ring, where so many bytes are written at once at the most."""
    if not longest_nbytes:
        return 0
    return min(BLOCK_BYTES, round_up(longest_nbytes, PAGE_BYTES) + PAGE_BYTES)


class PageWriter:
    """Writes a file anew: all of its bytes, also where there was one.

    Parameters
    ----------
    nbytes : int
        Of the file.
    ring : StagingRing
        Of slots of `block_nbytes`; several writers may share it, on one thread.

    Raises
    ------
    TierIOError
        If the file cannot be made, or its space is not there.
    """

    def __init__(self, path: Path, nbytes: int, engine: Engine, ring: StagingRing, waits: Waits) -> None:
        self._nbytes = nbytes
        self._engine = engine
        self._ring = ring
        self._waits = waits
        self._shared: dict[int, _SharedPage] = {}
        self._num_written = 0
        self._file = open_or_create(path)
        try:
            reserve_space(self._file, round_up(nbytes, PAGE_BYTES))
        except BaseException:
            self.close()
            raise

    def write(self, offset_bytes: int, sources: Sequence[torch.Tensor], stored: Stored | None = None) -> Written:
        """Write what `sources`, uint8 1D, hold one after the other, each byte of the file once.

        Parameters
        ----------
        stored : Stored, optional
            Where they lie in another file.

        Raises
        ------
        TierIOError
            If an earlier write failed.
        """
        digest, position = xxhash.xxh3_64(), offset_bytes
        leaving: list[Waitable] = []
        copied: list[torch.Tensor] = []
        for run in _runs(offset_bytes, sources):
            if not _is_in_place(position + _nbytes(copied), run):
                copied.append(run)
                continue
            position = self._write_copies(position, copied, digest)
            if stored is None or not self._share(position, run, stored):
                leaving.append(self._engine.submit_write(self._file, position, run))
            digest.update(run.numpy().data)
            self._num_written += run.numel()
            position += run.numel()
            copied = []
        self._write_copies(position, copied, digest)
        return Written(digest.hexdigest(), leaving)

    def finish(self) -> None:
        """Give the file its length, and make it durable, once all that was written is there.

        Raises
        ------
        TierIOError
            If that fails.
        """
        if self._shared or self._num_written != self._nbytes:
            raise InternalError(f"{self._file.path}: {self._num_written} of {self._nbytes} bytes were written")
        try:
            os.ftruncate(self._file.fd, self._nbytes)
        except OSError as error:
            raise TierIOError("write", self._file.path, error.errno or 0) from error
        self._engine.submit_flush(self._file).wait()

    def close(self) -> None:
        """Close the file, of which nothing is on its way; again is harmless."""
        self._file.close()

    def _share(self, position: int, run: torch.Tensor, stored: Stored) -> bool:
        """Let the file have the other one's blocks; whether that can be done."""
        offset = stored.offset_bytes + run.data_ptr() - stored.memory.data_ptr()
        return clone_range(stored.file, offset, self._file, position, run.numel())

    def _write_copies(self, position: int, left: list[torch.Tensor], digest: xxhash.xxh3_64) -> int:
        """Write bytes that are copied before this returns; where they end in the file."""
        end = position + _nbytes(left)
        while position < end:
            # Up to the end of a block of the file, so that the next write begins with one.
            stop = min(end, (position // BLOCK_BYTES + 1) * BLOCK_BYTES)
            position = self._write_block(position, stop, left, digest)
        return end

    def _write_block(self, start: int, stop: int, left: list[torch.Tensor], digest: xxhash.xxh3_64) -> int:
        first_page, lead = divmod(start, PAGE_BYTES)
        slot = self._ring.acquire(self._waits)
        leaving: list[Waitable] = []
        try:
            buffer = slot.take(round_up(lead + stop - start, PAGE_BYTES))
            content = buffer[lead : lead + stop - start]
            _take(left, content)
            digest.update(content.numpy().data)
            self._num_written += content.numel()
            pages = range(first_page, first_page + buffer.numel() // PAGE_BYTES)
            whole = range(
                pages.start if self._completes(pages.start, start, stop, buffer[:PAGE_BYTES]) else pages.start + 1,
                pages.stop
                if len(pages) == 1 or self._completes(pages.stop - 1, start, stop, buffer[-PAGE_BYTES:])
                else pages.stop - 1,
            )
            if whole:
                source = buffer[(whole.start - first_page) * PAGE_BYTES : (whole.stop - first_page) * PAGE_BYTES]
                leaving.append(self._engine.submit_write(self._file, whole.start * PAGE_BYTES, source))
        finally:
            self._ring.release(slot, leaving)
        return stop

    def _completes(self, page: int, start: int, stop: int, memory: torch.Tensor) -> bool:
        """Whether bytes `[start, stop)` of the file complete a page, which `memory` then holds; else it keeps them."""
        begin = page * PAGE_BYTES
        low, high = max(start - begin, 0), min(stop - begin, PAGE_BYTES)
        if high - low == PAGE_BYTES:
            return True
        shared = self._shared.setdefault(page, _SharedPage())
        shared.content[low:high] = memory[low:high]
        shared.num_bytes += high - low
        if shared.num_bytes < min(PAGE_BYTES, self._nbytes - begin):
            return False
        memory.copy_(self._shared.pop(page).content)
        return True


@dataclass(frozen=True)
class Stored:
    """That `memory`, uint8 1D, which begins with a page, is what a file holds from `offset_bytes` on."""

    memory: torch.Tensor
    file: OpenFile
    offset_bytes: int


@dataclass(frozen=True)
class Written:
    """Bytes that were handed over.

    Attributes
    ----------
    checksum : str
        Their XXH3-64.
    leaving : list[Waitable]
        Writes that still read them where they are; the others have been copied. See [Note: written in place].
    """

    checksum: str
    leaving: list[Waitable]


class _SharedPage:
    """A page of which some bytes are there; the others are 0."""

    def __init__(self) -> None:
        self.content = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
        self.num_bytes = 0


def _runs(position: int, sources: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The sources, cut so that what can be written in place is apart."""
    for source in sources:
        lead = min(-position % PAGE_BYTES, source.numel())
        end = lead + (source.numel() - lead) // PAGE_BYTES * PAGE_BYTES
        if _is_in_place(position + lead, source[lead:end]):
            yield from (run for run in (source[:lead], source[lead:end], source[end:]) if run.numel())
        else:
            yield source
        position += source.numel()


def _is_in_place(position: int, run: torch.Tensor) -> bool:
    """Whether a run that begins there in the file can be written from where it is."""
    is_paged = not any(value % PAGE_BYTES for value in (position, run.data_ptr(), run.numel()))
    return is_paged and run.numel() >= LEAST_IN_PLACE_BYTES


def _nbytes(sources: Sequence[torch.Tensor]) -> int:
    return sum(source.numel() for source in sources)


def _take(left: list[torch.Tensor], target: torch.Tensor) -> None:
    """Fill `target` from the first of `left`, which lose what was taken."""
    done = 0
    while done < target.numel():
        source = left[0]
        length = min(source.numel(), target.numel() - done)
        # Torch's copy takes its threads, which training beside a save wants for itself.
        np.copyto(target[done : done + length].numpy(), source[:length].numpy())
        done += length
        if length == source.numel():
            left.pop(0)
        else:
            left[0] = source[length:]
