"""Making a checkpoint of what a run has committed on its nvme paths, without the run."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import Engine, OpenFile, choose_engine
from zerooffload.aio.files import open_file
from zerooffload.checkpoint.folders import PartFolder
from zerooffload.checkpoint.kept_run import KeptChunk, KeptPart, KeptRecord, parts_of
from zerooffload.checkpoint.page_writer import Stored
from zerooffload.checkpoint.shard_writer import ShardWriter
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.formats import GIB
from zerooffload.journal import History, common_step, read_history
from zerooffload.memory import Budget
from zerooffload.telemetry import Recorder, Waitable, Waits
from zerooffload.tiers import RunDirectory, StagingRing, StagingSlot
from zerooffload.tiers.checksums import checksum
from zerooffload.tiers.directory import rank_directories
from zerooffload.tiers.nvme import STATES_FILE, damaged

_HOLDER = "records of a run"
_NUM_SLOTS = 3
"""Chunks under way: one is written, the others are read."""


def promote(nvme_paths: Sequence[Path], directory: Path) -> Path:
    """See `zo.promote`; the checkpoint's folder."""
    with ExitStack() as opened:
        directories = _lock(nvme_paths, opened)
        histories = {rank: read_history([held.path for held in of_rank]) for rank, of_rank in directories.items()}
        sequence = _committed(nvme_paths, histories)
        kept = [
            (history.manifest, history.records[sequence])
            for history in histories.values()
            if history.manifest is not None
        ]
        parts = parts_of(uuid.uuid4().hex, kept)
        engine = choose_engine().engine
        opened.callback(engine.close)
        folder = PartFolder(directory, kept[0][1].step, len(parts))
        opened.callback(folder.abandon)
        for rank, part in enumerate(parts):
            order = histories[rank].order
            in_order = [directories[rank][order.index(path)].path for path in range(len(order))]
            _write_part(part, in_order, folder.path, engine)
        return folder.commit()


def _lock(nvme_paths: Sequence[Path], opened: ExitStack) -> dict[int, list[RunDirectory]]:
    """The directories of all ranks, which no run uses meanwhile."""
    ranks = sorted({rank for path in nvme_paths for rank in rank_directories(path)})
    directories: dict[int, list[RunDirectory]] = {}
    for rank in ranks:
        directories[rank] = []
        for path in nvme_paths:
            directories[rank].append(RunDirectory(path, rank))
            opened.callback(directories[rank][-1].close)
    return directories


def _committed(nvme_paths: Sequence[Path], histories: dict[int, History]) -> int:
    """The newest commit that all ranks have."""
    where = ", ".join(str(path) for path in nvme_paths)
    common = common_step({rank: history.summary for rank, history in histories.items()})
    if common is None:
        raise CheckpointError(f"{where}: no run that finished a step; name the nvme_paths that the run was given")
    manifests = [history.manifest for history in histories.values() if history.manifest is not None]
    if any(manifest.part for manifest in manifests):
        raise ConfigError(
            f"{where}: each rank has a part of a model that was cut, or of a pipeline: resume the run, and call zo.save"
        )
    missing = sorted(set(range(manifests[0].world_size)) - set(histories))
    if missing or len(histories) > manifests[0].world_size:
        raise ConfigError(
            f"{where}: the run has {manifests[0].world_size} ranks, here are the directories of"
            f" {', '.join(map(str, histories))}: bring them together on one machine"
        )
    return common[1]


def _write_part(part: KeptPart, directories: Sequence[Path], folder: Path, engine: Engine) -> None:
    """Write a rank's files."""
    waits, accelerator, budget = Waits(Recorder()), CpuAccelerator(), Budget("host", GIB)
    with ExitStack() as opened:
        files = [open_file(path / STATES_FILE) for path in directories]
        for file in files:
            opened.callback(file.close)
        writer = ShardWriter(folder, part.manifest, engine, waits=waits, budget=budget, accelerator=accelerator)
        opened.callback(writer.close)
        slot_nbytes = max((_chunk_nbytes(chunk) for chunk in part.chunks), default=0)
        ring = StagingRing(_HOLDER, _NUM_SLOTS, slot_nbytes, budget, accelerator)
        opened.callback(ring.close)
        opened.callback(ring.drain, waits)
        under_way: deque[_Reading] = deque()
        upcoming = iter(enumerate(part.chunks))
        while True:
            while ring.num_free:
                number, chunk = next(upcoming, (-1, None))
                if chunk is None:
                    break
                under_way.append(_begin(number, chunk, ring.acquire(waits), files, engine))
            if not under_way:
                break
            reading = under_way.popleft()
            leaving: list[Waitable] = []
            try:
                leaving += reading.write(writer)
            finally:
                ring.release(reading.slot, [*reading.reads, *leaving])
        writer.finish()


def _chunk_nbytes(chunk: KeptChunk) -> int:
    """Of all its records."""
    return sum(record.nbytes for record in chunk.records)


@dataclass(frozen=True)
class _Reading:
    """A chunk on its way to memory."""

    number: int
    chunk: KeptChunk
    slot: StagingSlot
    records: list[tuple[KeptRecord, Stored]]
    reads: list[Waitable]

    def write(self, writer: ShardWriter) -> list[Waitable]:
        """Compare it with its checksums and hand it over; the writes that still read it."""
        for read in self.reads:
            read.wait()
        states: dict[str, list[torch.Tensor]] = {}
        stored: dict[str, Stored] = {}
        for record, place in self.records:
            if checksum(place.memory) != record.checksum:
                raise CheckpointError(str(damaged(place.file, place.offset_bytes, record.nbytes)))
            of_record = record.cut(place.memory, self.chunk.places)
            states.update(of_record)
            stored.update(dict.fromkeys(of_record, place))
        return writer.write(self.number, states, stored)


def _begin(number: int, chunk: KeptChunk, slot: StagingSlot, files: Sequence[OpenFile], engine: Engine) -> _Reading:
    reading = _Reading(number, chunk, slot, [], [])
    for record in chunk.records:
        place = Stored(slot.take(record.nbytes), files[record.path], record.offset_bytes)
        reading.records.append((record, place))
        reading.reads.append(engine.submit_read(place.file, place.offset_bytes, place.memory))
    return reading
