"""The nvme tier: two preallocated files a path, opened once.

`states.bin` holds what outlives the run (see `Kept`), in two slots a chunk where steps are committed; `scratch.bin`
what does not: gradients, and all states of a placement that cannot be resumed from here.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.files import create_file, open_file, reserve_space
from zerooffload.config import TierName
from zerooffload.errors import InternalError, TierIOError
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Lane, Link, Recorder, Waitable, Work
from zerooffload.tiers.api import Block, Kept
from zerooffload.tiers.checksums import checksum
from zerooffload.tiers.directory import RunDirectory
from zerooffload.tiers.records import RecordLayout
from zerooffload.tiers.slots import SlotTable

_log = logging.getLogger("zerooffload")

STATES_FILE = "states.bin"
SCRATCH_FILE = "scratch.bin"


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk's record lies: the path's index, and an offset for each slot, in bytes."""

    path: int
    offsets: tuple[int, ...]


class _CheckedRead:
    """A read whose bytes are compared with the checksum that they were written with."""

    def __init__(self, ticket: Waitable, target: torch.Tensor, expected: int, file: OpenFile, offset: int) -> None:
        self._ticket = ticket
        self._target = target
        self._expected = expected
        self._file = file
        self._offset = offset

    def wait(self) -> None:
        """Block; raise `TierIOError` also if the bytes are not what was written."""
        self._ticket.wait()
        if checksum(self._target) != self._expected:
            raise damaged(self._file, self._offset, self._target.numel())

    def done(self) -> bool:
        """Whether the bytes are here; they are compared in `wait`."""
        return self._ticket.done()


class _KeptWrite:
    """A write of what outlives the run: if it fails, the content is lost until it is written again."""

    def __init__(self, ticket: Waitable, slots: SlotTable, index: int) -> None:
        self._ticket = ticket
        self._slots = slots
        self._index = index
        self._was_told = False

    def wait(self) -> None:
        """Block; raise `TierIOError` if it failed."""
        try:
            self._ticket.wait()
        except TierIOError as error:
            if not self._was_told:
                self._was_told = True
                self._slots.lost(self._index, error)
            raise

    def done(self) -> bool:
        """Whether it is."""
        return self._ticket.done()


def damaged(file: OpenFile, offset: int, nbytes: int) -> TierIOError:
    """The error for bytes that are not what was written."""
    return TierIOError(
        "read",
        file.path,
        errno.EBADMSG,
        offset_bytes=offset,
        length_bytes=nbytes,
        transferred_bytes=nbytes,
        advice="The checksum is not that of what was written there: the drive, or somebody else, changed it.",
    )


class NvmeBlock:
    """Records on files; see `Block`. Chunk `i` has an extent of its own, so chunks may lie on different paths.

    Attributes
    ----------
    places : list[ChunkPlace]
        Of its chunks, in their order.
    kept_chunks : range
        Those that outlive the run.
    first_index : int or None
        Of these in the tier's slot table; None if there are none.
    """

    mirror: Block | None = None
    needs_device = False

    def __init__(
        self,
        layout: RecordLayout,
        places: list[ChunkPlace],
        first_index: int | None,
        tier: NvmeTier,
        *,
        kept_chunks: range = range(0),
        name: str = "",
    ) -> None:
        self.name = name
        self.layout = layout
        self.places = places
        self.first_index = first_index
        self.kept_chunks = kept_chunks
        self.num_places = min((len(place.offsets) for place in self.kept_places or places), default=1)
        # Of what is not kept: which of its places is the record.
        self._current = dict.fromkeys(layout.chunks, 0)
        self._tier = tier
        self._versions = dict.fromkeys(layout.chunks, 0)

    @property
    def kept_places(self) -> list[ChunkPlace]:
        """The places of the chunks that outlive the run."""
        return [self.place_of(chunk) for chunk in self.kept_chunks]

    def place_of(self, chunk: int) -> ChunkPlace:
        """Where a chunk's record lies."""
        return self.places[self.layout.chunks.index(chunk)]

    def slot_index(self, chunk: int) -> int | None:
        """Of a chunk in the tier's slot table; None for one that need not outlive the run."""
        if self.first_index is None or chunk not in self.kept_chunks:
            return None
        return self.first_index + self.kept_chunks.index(chunk)

    def view(self, space: object, chunk: int) -> None:
        """No space can address a file."""

    def whole(self, space: object) -> None:
        """No space can address a file."""

    def version(self, chunk: int) -> int | None:
        """How often it was written."""
        return self._versions[chunk]

    def read(self, chunk: int, target: torch.Tensor) -> Waitable:
        """One read of the record, from its newest slot."""
        return self._read(chunk, target, check=self._tier.checks_reads)

    def read_checked(self, chunk: int, target: torch.Tensor) -> Waitable:
        """A read that also compares the checksum."""
        return self._read(chunk, target, check=True)

    def write(self, chunk: int, source: torch.Tensor) -> Waitable:
        """One write of the record, to the slot that may be overwritten."""
        slots, index = self._tier.slots, self.slot_index(chunk)
        if index is None:
            return self._write(chunk, self._current[chunk], source)
        slot = slots.begin_write(index)
        ticket = self._write(chunk, slot, source)
        # While the drive is at work: this takes as long as a fifth of the write does at 7 GB/s.
        slots.wrote(index, slot, self._checksum(chunk, source))
        return _KeptWrite(ticket, slots, index)

    def initialize(self, chunk: int, source: torch.Tensor) -> Waitable:
        """The first write, to every slot: later writes then need no new blocks of the file system."""
        tickets = [self._write(chunk, slot, source) for slot in range(len(self.place_of(chunk).offsets))]
        index = self.slot_index(chunk)
        if index is not None:
            self._tier.slots.wrote(index, 0, self._checksum(chunk, source))
        return _All(tickets)

    def may_write_ahead(self, chunk: int) -> bool:
        """If it has two places; of what is kept, if the newest is the committed one."""
        index = self.slot_index(chunk)
        return self.num_places > 1 if index is None else self._tier.slots.may_write_ahead(index)

    def view_ahead(self, chunk: int) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Never asked for."""
        raise InternalError("a record on a file was to be updated in place")

    def write_ahead(self, chunk: int, source: torch.Tensor) -> Waitable:
        """To the slot that no step names, or to the place that is not the record."""
        slots, index = self._tier.slots, self.slot_index(chunk)
        if index is None:
            return self._write(chunk, 1 - self._current[chunk], source)
        slot = slots.begin_write(index)
        ticket = self._write(chunk, slot, source)
        slots.wrote_ahead(index, slot, self._checksum(chunk, source))
        return ticket

    def take_ahead(self, chunk: int) -> None:
        """Let its slot be the newest, or the places change roles."""
        index = self.slot_index(chunk)
        if index is None:
            self._current[chunk] = 1 - self._current[chunk]
        else:
            self._tier.slots.take_ahead(index)

    def drop_ahead(self, chunk: int) -> None:
        """Forget its slot; who still has that content has not the record's."""
        self._versions[chunk] += 1
        index = self.slot_index(chunk)
        if index is not None:
            self._tier.slots.drop_ahead(index)

    def _read(self, chunk: int, target: torch.Tensor, *, check: bool) -> Waitable:
        place, slot, expected = self.place_of(chunk), self._current[chunk], None
        index = self.slot_index(chunk)
        if index is not None:
            slot = self._tier.slots.current(index)
            expected = self._tier.slots.checksum(index)
        file, offset = self._tier.file_of(self, chunk), place.offsets[slot]
        self._tier.recorder.moved(Link.NVME_READ, target.numel())
        begin = time.perf_counter()
        submitted = self._tier.engine.submit_read(file, offset, target)
        name = f"{self.name} #{chunk}"
        ticket = self._tier.recorder.in_flight(Lane.NVME_READ, name, begin, submitted, target.numel())
        return _CheckedRead(ticket, target, expected, file, offset) if check and expected is not None else ticket

    def _checksum(self, chunk: int, source: torch.Tensor) -> int:
        with self._tier.recorder.working(Work.CHECKSUM, f"{self.name} #{chunk}"):
            return checksum(source)

    def _write(self, chunk: int, slot: int, source: torch.Tensor) -> Waitable:
        place = self.place_of(chunk)
        self._versions[chunk] += 1
        self._tier.recorder.moved(Link.NVME_WRITTEN, source.numel())
        begin = time.perf_counter()
        submitted = self._tier.engine.submit_write(self._tier.file_of(self, chunk), place.offsets[slot], source)
        name = f"{self.name} #{chunk}"
        return self._tier.recorder.in_flight(Lane.NVME_WRITE, name, begin, submitted, source.numel())


class _All:
    """Several operations as one."""

    def __init__(self, tickets: Sequence[Waitable]) -> None:
        self._tickets = tickets

    def wait(self) -> None:
        """Block until all are done; raise the first failure."""
        failure: Exception | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except TierIOError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        """Whether all are."""
        return all(ticket.done() for ticket in self._tickets)


class NvmeTier:
    """Files in directories of ours, one directory a path. See `Tier`.

    Each chunk goes to the path that holds least so far, measured by what the path can bear.

    Parameters
    ----------
    directories : Sequence[RunDirectory]
        Locked; the tier closes them.
    speeds : Sequence[float], optional
        Of the paths, in any unit: chunks are spread in proportion. Default: all equal.
    kept : Mapping[str, Sequence[ChunkPlace]], optional
        Where the blocks of a run that is continued lie, by name; their files are opened as they are.

    Attributes
    ----------
    slots : SlotTable
    checks_reads : bool
        Whether every read of what is kept compares its checksum.
    keeps_files : bool
        Whether closing leaves `states.bin` where it is.

    Raises
    ------
    TierIOError
        If a file cannot be made or opened.
    """

    def __init__(
        self,
        directories: Sequence[RunDirectory],
        budget: Budget,
        engine: Engine,
        recorder: Recorder,
        *,
        speeds: Sequence[float] = (),
        kept: Mapping[str, Sequence[ChunkPlace]] | None = None,
        checks_reads: bool = False,
    ) -> None:
        self.name = TierName.NVME
        self.budget = budget
        self.engine = engine
        self.recorder = recorder
        self.slots = SlotTable()
        self.checks_reads = checks_reads
        self.keeps_files = kept is not None
        self.directories = list(directories)
        self.state_files: list[OpenFile] = []
        self._scratch_files: list[OpenFile] = []
        self._speeds = list(speeds) or [1.0] * len(self.directories)
        self._kept = kept
        self._num_state_bytes = [0] * len(self.directories)
        self._num_scratch_bytes = [0] * len(self.directories)
        self._leases: list[Lease] = []
        try:
            for directory in self.directories:
                open_states = create_file if kept is None else open_file
                self.state_files.append(open_states(directory.path / STATES_FILE))
                self._scratch_files.append(create_file(directory.path / SCRATCH_FILE))
        except BaseException:
            self.close()
            raise

    @property
    def reads_device(self) -> bool:
        """Whether targets of reads may be a device's memory: checksums are computed in the host's."""
        return self.engine.reads_devices and not self.checks_reads

    def block_nbytes(self, layout: RecordLayout, kept: Kept | None = None, num_places: int = 1) -> int:
        """Records, each padded to the file's alignment, in every slot or place."""
        if kept is None:
            return layout.total_file_nbytes * num_places
        return layout.total_file_nbytes + (kept.num_slots - 1) * kept.part_of(layout).total_file_nbytes

    def allocate(
        self, layout: RecordLayout, holder: str, kept: Kept | None = None, *, name: str = "", num_places: int = 1
    ) -> NvmeBlock:
        """Extents for all records."""
        self._leases.append(self.budget.lease(self.block_nbytes(layout, kept, num_places), holder))
        if kept is None:
            places = self._places(layout, layout.chunks, num_places, self._num_scratch_bytes)
            return NvmeBlock(layout, places, None, self, name=name)
        chunks = kept.part_of(layout).chunks
        first_index = self.slots.add(len(chunks), kept.num_slots)
        if self._kept is None:
            places = self._places(layout, chunks, kept.num_slots, self._num_state_bytes)
        else:
            places = list(self._kept[kept.name])
        before, behind = range(layout.chunks.start, chunks.start), range(chunks.stop, layout.chunks.stop)
        places = [
            *self._places(layout, before, 1, self._num_scratch_bytes),
            *places,
            *self._places(layout, behind, 1, self._num_scratch_bytes),
        ]
        return NvmeBlock(layout, places, first_index, self, kept_chunks=chunks, name=name)

    def file_of(self, block: NvmeBlock, chunk: int) -> OpenFile:
        """The file that a chunk of a block lies on."""
        files = self._scratch_files if block.slot_index(chunk) is None else self.state_files
        if not files:
            raise InternalError("the nvme tier is closed")
        return files[block.place_of(chunk).path]

    def reserve(self) -> None:
        """Give every file its length; the disk being full is known here."""
        if self._kept is None:
            for file, nbytes in zip(self.state_files, self._num_state_bytes, strict=True):
                reserve_space(file, nbytes)
        for file, nbytes in zip(self._scratch_files, self._num_scratch_bytes, strict=True):
            reserve_space(file, nbytes)

    def close(self) -> None:
        """Finish I/O, delete the files that are not kept, unlock the directories; again is harmless.

        What cannot be deleted stays, with a message: the next run takes its place over.
        """
        self.engine.close()
        for file in (*self.state_files, *self._scratch_files):
            file.close()
        if all(directory.is_held for directory in self.directories):
            for file in (*(() if self.keeps_files else self.state_files), *self._scratch_files):
                try:
                    file.path.unlink(missing_ok=True)
                except OSError as error:
                    _log.warning("%s cannot be removed: %s", file.path, error.strerror)
        for directory in self.directories:
            directory.close()
        for lease in self._leases:
            lease.release()
        self.state_files, self._scratch_files, self.directories, self._leases = [], [], [], []

    def _places(self, layout: RecordLayout, chunks: range, num_slots: int, used: list[int]) -> list[ChunkPlace]:
        """Chunks on the least used paths; a slot of all of them lies in one piece, so that reads run on."""
        loads = list(used)
        paths = []
        for chunk in chunks:
            nbytes = layout.file_nbytes(chunk) * num_slots
            path = min(range(len(loads)), key=lambda index: (loads[index] + nbytes) / self._speeds[index])
            loads[path] += nbytes
            paths.append(path)
        offsets: list[list[int]] = [[] for _ in paths]
        for _ in range(num_slots):
            for chunk, path, of_chunk in zip(chunks, paths, offsets, strict=True):
                of_chunk.append(used[path])
                used[path] += layout.file_nbytes(chunk)
        return [ChunkPlace(path, tuple(of_chunk)) for path, of_chunk in zip(paths, offsets, strict=True)]
