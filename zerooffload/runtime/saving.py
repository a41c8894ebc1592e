"""Saving checkpoints: at once, or beside the training."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerooffload.checkpoint.boxes import Box
from zerooffload.checkpoint.folders import PartFolder, remove_leftovers
from zerooffload.checkpoint.manifest import BoxEntry, ChunkEntry, GroupEntry, Manifest, ParamEntry, RunEntry, StateEntry
from zerooffload.checkpoint.shard_writer import ShardWriter
from zerooffload.config import TierName
from zerooffload.errors import CheckpointError, ConfigError, RankError, ZeroOffloadError
from zerooffload.optim.record import OptimizerStates
from zerooffload.runtime.logical_states import (
    ChunkReading,
    HeldParam,
    LogicalStates,
    StateChunk,
    box_of,
    held_params,
    state_chunks,
)
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.runtime.snapshots import Snapshot, Snapshots
from zerooffload.runtime.worker_thread import Outcome
from zerooffload.sharding.collectives import Collectives, StepAgreement, agree, gather_from_all
from zerooffload.sharding.unit import Unit, UnitFlat
from zerooffload.telemetry import Wait, Waitable, wait_for_all
from zerooffload.tiers import dtype_name

_WELL, _FAILED = 1, 0
MOST_UNDER_WAY = 4
"""Chunks whose writes the drive has still to do: enough that it is never idle, few enough for who waits for one."""


class SaveTicket(Outcome):
    """A checkpoint on its way; `wait` raises what went wrong.

    Attributes
    ----------
    path : pathlib.Path
        Its folder, once it is there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds beside the states; `extra` is a JSON value, `step` the number of finished ones."""

    step: int
    run: RunEntry
    extra: Any


@dataclass(frozen=True)
class _Role:
    """A rank's place among all that save.

    Attributes
    ----------
    save : str
        Names this save, the same on each rank.
    writes : bool
        Whether its states are not another rank's too.
    """

    save: str
    rank: int
    num_ranks: int
    writes: bool


class Saver:
    """Makes checkpoints of a run, one after the other. Its methods are for the thread that trains."""

    def __init__(
        self,
        units: Sequence[Unit],
        states: OptimizerStates,
        *,
        resources: Resources,
        parts: Parts,
        collectives: Collectives,
        snapshots: Snapshots,
    ) -> None:
        self._units = units
        self._states = states
        self._resources = resources
        self._parts = parts
        self._collectives = collectives
        self._snapshots = snapshots
        self._agreement: StepAgreement | None = None
        self._ticket: SaveTicket | None = None
        self._thread: threading.Thread | None = None
        self._with_spares: set[Path] = set()

    def save(
        self,
        directory: Path,
        contents: Contents,
        updates: Mapping[UnitFlat, Waitable],
        *,
        keep_last: int | None,
        blocking: bool,
    ) -> SaveTicket:
        """See `zo.save`. Collective.

        Parameters
        ----------
        updates : Mapping[UnitFlat, Waitable]
            Hidden updates of the step that is saved.
        """
        self.finish()
        if self._agreement is None:
            self._agreement = self._collectives.agreement()
        role = self._role()
        folder = agree(self._collectives, lambda: _make_folder(role, directory, contents.step), "saving a checkpoint")
        chunks = [chunk for chunk in state_chunks(self._units) if role.writes and chunk.part.flat.layout.counts]
        job = _Job(role, folder, self._agreement, self._resources, self._parts)
        try:
            names = gather_from_all(self._collectives, None if folder is None else folder.name)
            (name,) = [name for name in names if name is not None]
            part = directory / name.part
            manifest = self._manifest(role, contents, chunks)
            agree(self._collectives, lambda: job.begin(part, manifest, chunks, updates), "saving a checkpoint")
        except BaseException:
            job.abandon()
            raise
        ticket = SaveTicket(directory / name.final)
        if folder is not None and keep_last is not None:
            self._with_spares.add(directory)
        self._snapshots.current = job.snapshot
        if blocking:
            self._finish(job, ticket, keep_last)
            ticket.wait()
        else:
            self._ticket = ticket
            self._begin_thread(job, ticket, keep_last)
        return ticket

    def finish(self) -> None:
        """Return when no save is under way; what failed is told by its ticket."""
        if self._ticket is not None:
            with suppress(Exception):
                self._ticket.wait()
        if self._thread is not None:
            # What it lets go of in the end must not meet the end of the process.
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """`finish`, and remove what the next save would have written over; again is harmless."""
        self.finish()
        directories, self._with_spares = self._with_spares, set()
        for directory in directories:
            with suppress(CheckpointError):
                remove_leftovers(directory)

    def _begin_thread(self, job: _Job, ticket: SaveTicket, keep_last: int | None) -> None:
        def finish() -> None:
            with self._parts.recorder.in_background():
                self._finish(job, ticket, keep_last)

        thread = threading.Thread(target=finish, name="zerooffload-save", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:
            # The system has no thread left: it is done at once.
            self._finish(job, ticket, keep_last)

    def _finish(self, job: _Job, ticket: SaveTicket, keep_last: int | None) -> None:
        """The rest of a save, whatever comes of it; the ticket tells."""
        failure: BaseException | None = None
        try:
            failure = job.finish(keep_last)
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            failure = error
        finally:
            self._snapshots.current = None
            job.abandon()
            ticket.over(failure)

    def _role(self) -> _Role:
        """Who writes what. Collective."""
        collectives = self._collectives
        mine = (collectives.rank, collectives.global_rank, uuid.uuid4().hex)
        parts = collectives.gather_of_parts(collectives.gather_objects(mine))
        if len(parts) > 1:
            self._check_names_differ()
        ranks = [(number, *of_rank) for number, part in enumerate(parts) for of_rank in part]
        place = next(place for place, (_, _, rank, _) in enumerate(ranks) if rank == collectives.global_rank)
        is_first = all(other[:2] != ranks[place][:2] for other in ranks[:place])
        return _Role(ranks[0][3], place, len(ranks), is_first)

    def _check_names_differ(self) -> None:
        seen: dict[str, list[Box]] = {}
        mine = [(held.param.name, box_of(held.param)) for held in held_params(self._units) if held.counts]
        for of_part in self._collectives.gather_of_parts(mine):
            both = [
                name
                for name, box in of_part
                if any(other.shape != box.shape or other.overlaps(box) for other in seen.get(name, ()))
            ]
            if both:
                raise ConfigError(
                    f"two stages of the pipeline have a parameter {min(both)}, so a checkpoint could not tell them"
                    " apart: let them keep the names that the whole model has"
                )
            for name, box in of_part:
                seen.setdefault(name, []).append(box)

    def _manifest(self, role: _Role, contents: Contents, chunks: Sequence[StateChunk]) -> Manifest:
        """What this rank writes, without checksums."""
        held = held_params(self._units) if role.writes else []
        held = [item for item in held if item.counts and (item.stop > item.start or not item.param.numel)]
        groups = list(dict.fromkeys(_group(item) for item in held))
        return Manifest(
            save=role.save,
            rank=role.rank,
            num_ranks=role.num_ranks,
            step=contents.step,
            algorithm=self._states.algorithm,
            moments=self._states.moments,
            groups=tuple(groups),
            params=tuple(_param(item, groups.index(_group(item))) for item in held),
            chunks=tuple(_chunk(chunk) for chunk in chunks),
            run=contents.run,
            extra=contents.extra,
        )


class _Job:
    """One save of a rank.

    Attributes
    ----------
    snapshot : Snapshot
        Of what is left to be read once it has begun.
    """

    def __init__(
        self,
        role: _Role,
        folder: PartFolder | None,
        agreement: StepAgreement,
        resources: Resources,
        parts: Parts,
    ) -> None:
        self.snapshot = Snapshot((), {})
        self._role = role
        self._folder = folder
        self._agreement = agreement
        self._resources = resources
        self._parts = parts
        self._open = ExitStack()
        self._numbers: dict[StateChunk, int] = {}

    def begin(
        self, part: Path, manifest: Manifest, chunks: Sequence[StateChunk], updates: Mapping[UnitFlat, Waitable]
    ) -> None:
        """Make the files, and write what only the thread that trains can read."""
        if not part.is_dir():
            raise ConfigError(f"{part} was made by rank 0 and is not here: the ranks must share the directory")
        resources, parts = self._resources, self._parts
        host = resources.budgets[TierName.HOST]
        if resources.nvme is not None:
            engine = resources.nvme.engine
        else:
            engine = resources.open_engine()
            self._open.callback(engine.close)
        self._writer = ShardWriter(
            part, manifest, engine, waits=parts.waits, budget=host, accelerator=parts.accelerator
        )
        self._open.callback(self._writer.close)
        self._states = self._open.enter_context(LogicalStates(chunks, host, parts))
        self._numbers = {chunk: number for number, chunk in enumerate(chunks)}
        for reading in self._states.read(chunk for chunk in chunks if chunk.needs_device):
            self._write(reading)
        self.snapshot = Snapshot([chunk for chunk in chunks if not chunk.needs_device], updates)

    def finish(self, keep_last: int | None) -> BaseException | None:
        """Write the rest, and commit the checkpoint with the other ranks; what went wrong."""
        failure = self._agreed(_failure_of(self._write_rest))
        if failure is not None:
            return failure
        return self._agreed(_failure_of(lambda: self._commit(keep_last)))

    def abandon(self) -> None:
        """Give everything back; what is no checkpoint is removed. Again is harmless."""
        self.snapshot.abandon()
        # What failed was told.
        with suppress(ZeroOffloadError):
            self._open.close()
        if self._folder is not None:
            self._folder.abandon()

    def _write_rest(self) -> None:
        under_way: deque[list[Waitable]] = deque()
        for reading in self._states.read(iter(self.snapshot.next, None)):
            self._write(reading)
            self.snapshot.was_read(reading.chunk, reading.leaving)
            under_way.append(reading.leaving)
            if len(under_way) > MOST_UNDER_WAY:
                # What somebody waits for is read next: not behind all that the drive has still to do.
                wait_for_all(self._parts.waits, Wait.STATE_WRITE, under_way.popleft())
        self._writer.finish()

    def _write(self, reading: ChunkReading) -> None:
        chunk, views = reading.chunk, reading.views()
        cuts = [chunk.cut(views, place) for place in chunk.places]
        states = {part.name: [cut[part.name] for cut in cuts] for part in chunk.states}
        reading.leaving += self._writer.write(self._numbers[chunk], states)

    def _commit(self, keep_last: int | None) -> None:
        if self._folder is None:
            return
        self._folder.commit()
        if keep_last is not None:
            self._folder.keep_last(keep_last)

    def _agreed(self, failure: BaseException | None) -> BaseException | None:
        """The failure of this rank, or that another has one."""
        try:
            least = self._agreement.least(_WELL if failure is None else _FAILED)
        except RankError as gone:
            return failure or gone
        if failure is None and least == _FAILED:
            return RankError("another rank could not save its part of the checkpoint")
        return failure


def _failure_of(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - raised by who waits
        return error
    return None


def _make_folder(role: _Role, directory: Path, step: int) -> PartFolder | None:
    """One rank makes it."""
    return PartFolder(directory, step, role.num_ranks) if role.rank == 0 else None


def _group(held: HeldParam) -> GroupEntry:
    states = tuple(StateEntry(part.name, dtype_name(part.dtype), part.block_numel) for part in held.states)
    return GroupEntry(dtype_name(held.dtype), held.trainable, states)


def _param(held: HeldParam, group: int) -> ParamEntry:
    param = held.param
    part = None if param.cut is None else BoxEntry(param.cut.offsets, param.shape)
    return ParamEntry(param.name, param.aliases, param.whole_shape, group, held.start, held.stop, held.num_steps, part)


def _chunk(chunk: StateChunk) -> ChunkEntry:
    """Before its checksums are known."""
    numel = sum(piece.stop - piece.start for piece in chunk.pieces)
    return ChunkEntry(numel, {part.name: "0" * 16 for part in chunk.states})
