"""The directories of a run on the nvme tier, and the run that they hold already, if it is to be continued."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerooffload.config import OffloadConfig, TierName
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.journal import (
    FlatEntry,
    History,
    Manifest,
    ParamEntry,
    PartEntry,
    StateEntry,
    StepRecord,
    common_step,
    forget_run,
    read_history,
)
from zerooffload.journal.manifest import first_difference
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.placement import FlatPlacement, StatePlacement
from zerooffload.sharding.collectives import Collectives, agree, gather_from_all
from zerooffload.tiers import ChunkPlace, NvmeBlock, RunDirectory, dtype_name
from zerooffload.tiers.nvme import STATES_FILE

_log = logging.getLogger("zerooffload")


@dataclass(frozen=True)
class Storage:
    """Locked directories, in the order of the run's paths.

    Attributes
    ----------
    manifest : Manifest
        Of a run that begins, without places.
    record : StepRecord or None
        The step that a run is continued from; None for one that begins.
    """

    directories: tuple[RunDirectory, ...]
    manifest: Manifest
    record: StepRecord | None

    @property
    def places(self) -> Mapping[str, Sequence[ChunkPlace]] | None:
        """Where the blocks of a run that is continued lie, by name."""
        if self.record is None:
            return None
        return {
            state.name: [ChunkPlace(path, tuple(offsets)) for path, offsets in state.chunks]
            for state in self.manifest.states
        }


def open_storage(plan: AnnouncedPlan, config: OffloadConfig, collectives: Collectives) -> Storage | None:
    """Lock the directories and find out, with all ranks, what is in them. None if nothing lives on nvme.

    Raises
    ------
    ConfigError
        If a path cannot be used, or holds a run that is neither continued nor to be overwritten.
    CheckpointError
        If files of a run that could be continued are missing or damaged.
    TierIOError
        If an earlier run's files cannot be removed.
    """
    if not plan.planned_bytes(TierName.NVME) and not config.keeps_activations_on_nvme:
        return None
    directories: list[RunDirectory] = []
    try:
        history = agree(collectives, lambda: _lock_and_read(config, collectives, directories), "opening the nvme paths")
        return _decide(plan, config, collectives, directories, history)
    except BaseException:
        for directory in directories:
            directory.close()
        raise


def _lock_and_read(config: OffloadConfig, collectives: Collectives, directories: list[RunDirectory]) -> History:
    directories.extend(RunDirectory(path, collectives.global_rank) for path in config.nvme_paths)
    if config.overwrite:
        return History()
    history = read_history([directory.path for directory in directories])
    for problem in history.problems:
        _log.warning("%s; a crash while it was written leaves it so, and then the step before it counts", problem)
    return history


def _decide(
    plan: AnnouncedPlan,
    config: OffloadConfig,
    collectives: Collectives,
    directories: list[RunDirectory],
    history: History,
) -> Storage:
    everyones = gather_from_all(collectives, (collectives.global_rank, history.summary, uuid.uuid4().hex))
    common = common_step({rank: summary for rank, summary, _ in everyones})
    planned = planned_manifest(plan, config, collectives, everyones[0][2])
    if common is None or history.manifest is None:
        agree(collectives, lambda: forget_run([directory.path for directory in directories]), "clearing the nvme paths")
        return Storage(tuple(directories), planned, None)
    _, sequence, step = common
    agree(collectives, lambda: _check_continuable(plan, history, planned, step), "continuing the run")
    agree(collectives, lambda: _check_there(directories), "continuing the run")
    in_order = tuple(directories[history.order.index(path)] for path in range(len(directories)))
    return Storage(in_order, history.manifest, history.records[sequence])


def _check_continuable(plan: AnnouncedPlan, history: History, planned: Manifest, step: int) -> None:
    if history.manifest is None:
        return
    if plan.placement.commits_steps:
        reason = first_difference(history.manifest, planned)
    else:
        reason = "with this placement steps are not committed (see atomic_steps and durable)"
    if reason:
        raise ConfigError(
            f"the nvme paths hold a run that finished step {step}, and this one cannot continue it: {reason}."
            " Continue with the model and settings that it had, name other paths, or set overwrite=True to lose it"
        )


def _check_there(directories: Sequence[RunDirectory]) -> None:
    for directory in directories:
        path = directory.path / STATES_FILE
        if not path.is_file():
            raise CheckpointError(f"{path} is not there: the run cannot be continued without it")


def planned_manifest(plan: AnnouncedPlan, config: OffloadConfig, collectives: Collectives, run: str) -> Manifest:
    """The manifest of a run that begins, without places."""
    flats = [flat for unit in plan.placement.units for flat in unit.flats]
    kept = [state for flat in flats for state in flat.states() if state.kept is not None]
    return Manifest(
        run=run,
        rank=collectives.global_rank,
        world_size=collectives.world_size,
        path=0,
        num_paths=len(config.nvme_paths),
        algorithm=config.algorithm,
        moments=config.moments,
        flats=tuple(_flat_entry(flat) for flat in flats),
        states=tuple(_state_entry(state) for state in kept),
        part=collectives.part,
    )


def with_places(manifest: Manifest, blocks: Sequence[NvmeBlock]) -> Manifest:
    """The manifest with the places of its blocks, which come in the order of its states."""
    states = (
        replace(state, chunks=tuple((place.path, place.offsets) for place in block.kept_places))
        for state, block in zip(manifest.states, blocks, strict=True)
    )
    return replace(manifest, states=tuple(states))


def _flat_entry(flat: FlatPlacement) -> FlatEntry:
    layout = flat.layout
    return FlatEntry(
        name=layout.name,
        dtype=dtype_name(layout.dtype),
        trainable=layout.trainable,
        numel=layout.numel,
        shard_start=flat.own.start * layout.shard_numel,
        params=tuple(
            ParamEntry(slot.param.name, slot.param.aliases, slot.param.shape, slot.start) for slot in layout.slots
        ),
    )


def _state_entry(state: StatePlacement) -> StateEntry:
    return StateEntry(
        name=state.kept.name if state.kept is not None else "",
        numel=state.layout.shard_numel,
        num_shards=len(state.kept_layout.shards),
        chunk_numel=state.layout.chunk_numel,
        num_slots=state.kept.num_slots if state.kept is not None else 1,
        parts=tuple(PartEntry(part.name, dtype_name(part.dtype), part.block_numel) for part in state.layout.parts),
    )
