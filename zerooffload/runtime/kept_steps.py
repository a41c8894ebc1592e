"""The steps that a run's directory keeps: begun, committed one after the other, and taken up again by a later run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerooffload.errors import ConfigError, InternalError
from zerooffload.journal import Journal, StepRecord
from zerooffload.runtime.commits import Commits
from zerooffload.runtime.kept_chunks import KeptChunks
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.runtime.storage import Storage, with_places
from zerooffload.runtime.tracking import Tracking
from zerooffload.sharding.collectives import Collectives, StepAgreement, agree
from zerooffload.sharding.unit import Unit, trainable
from zerooffload.telemetry import Waitable
from zerooffload.tiers import Block, NvmeBlock, SlotState


class KeptSteps:
    """What of a run outlives it. Where steps are not kept, its methods do nothing.

    Attributes
    ----------
    tracking : Tracking
        What besides the states belongs to a step.
    """

    def __init__(self, units: Sequence[Unit], resources: Resources, parts: Parts, collectives: Collectives) -> None:
        self.tracking = Tracking(parts.accelerator)
        self._units = units
        self._resources = resources
        self._parts = parts
        self._collectives = collectives
        self._unresumed: StepRecord | None = None
        self._random_at_forward: dict[str, Any] | None = None

    def begin(self, storage: Storage, agreement: StepAgreement, *, in_background: bool) -> None:
        """Begin the journal of a run that begins, or take up that of one that is continued."""
        nvme, record = self._resources.nvme, storage.record
        if nvme is None:
            raise InternalError("steps are kept without an nvme tier")
        directories = [directory.path for directory in storage.directories]
        journal = Journal(directories, nvme.engine, nvme.state_files, len(nvme.slots), is_new=record is None)
        # The run must not be kept alive by what ends it.
        own_late = weakref.WeakMethod(self._take_late)

        def take_late(at_forward: bool) -> dict[str, Any] | None:  # noqa: FBT001
            take = own_late()
            return None if take is None else take(at_forward)

        self._resources.commits = Commits(
            journal,
            nvme.slots,
            agreement,
            self._parts.waits,
            run_id=storage.manifest.run_id,
            sequence=0 if record is None else record.sequence,
            step=0 if record is None else record.step,
            take_late=take_late,
            in_background=in_background,
        )
        if record is None:
            manifest = with_places(storage.manifest, [kept for _, kept in self.blocks()])
            state = {**self.tracking.at_step(), **self._take_late(at_forward=False)}
            journal.begin(manifest, StepRecord(manifest.run_id, 0, 0, nvme.slots.state(), state))
        else:
            nvme.slots.restore(record.chunks)
            nvme.slots.commit(record.chunks)
            self._unresumed = record

    def blocks(self) -> Iterator[tuple[Block, NvmeBlock]]:
        """What outlives the run: a state's home, and where it is kept; the same block if that is its home."""
        for unit in self._units:
            for part in unit.parts:
                for block in (part.home, part.training.optimizer if part.training is not None else None):
                    kept = block.mirror or block if block is not None else None
                    if block is not None and isinstance(kept, NvmeBlock) and kept.first_index is not None:
                        yield block, kept

    @property
    def step(self) -> int | None:
        """The newest that is committed; None where steps are not kept."""
        return None if self._resources.commits is None else self._resources.commits.step

    def resume(self, optimizers: Sequence[torch.optim.Optimizer], num_steps: int) -> int:
        """See `zo.resume`. `num_steps` are finished in this run."""
        commits, record = self._resources.commits, self._unresumed
        if commits is None:
            raise ConfigError(
                "this placement resumes from checkpoints only: steps are committed where all trained states live on"
                " nvme, or with durable=True; and not with atomic_steps=False"
            )
        if record is None:
            if num_steps:
                raise ConfigError("zo.resume comes before training: this run has finished steps already")
            return 0
        agree(self._collectives, lambda: self._take_up(record, optimizers), "resuming")
        agree(self._collectives, lambda: commits.continue_from(record), "resuming")
        self._unresumed = None
        self._random_at_forward = record.state.get("random_at_forward")
        return record.step

    def take_over(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """What belongs to the run beside its states is as a checkpoint says, which is loaded next.

        Raises
        ------
        ConfigError
            If other objects are tracked now, or the optimizers have other groups.
        """
        if self._resources.commits is not None:
            # The step before is one of what was trained.
            self._resources.commits.settle()
        self.tracking.put_back(state, optimizers)
        self._random_at_forward = None

    def check_resumed(self) -> None:
        """See that values are this run's: one that its directory holds is neither shown nor lost.

        Raises
        ------
        ConfigError
            Before `zo.resume`.
        """
        if self._unresumed is not None:
            raise ConfigError(
                f"the nvme paths hold a run that finished step {self._unresumed.step}: continue it with"
                " zo.resume(model, optimizer), or lose it with OffloadConfig(overwrite=True)"
            )

    def training_begins(self) -> None:
        """A forward begins that may be trained on: the user's loop is through with the step before."""
        if self._random_at_forward is not None:
            self.tracking.put_back_random(self._random_at_forward)
            self._random_at_forward = None
        if self._resources.commits is not None:
            self._resources.commits.seal(at_forward=True)

    def step_begins(self) -> dict[str, Any]:
        """The step before is committed, so its slots may be written to; what belongs to this step, for `commit`."""
        if self._resources.commits is None:
            return {}
        self._resources.commits.settle()
        return self.tracking.at_step()

    def commit(self, step: int, state: dict[str, Any], written: Waitable) -> None:
        """Commit a step once its states are written."""
        if self._resources.commits is not None:
            self._resources.commits.begin(step, state, written)

    def slots(self) -> SlotState | None:
        """What an update that fails can be undone to: None where it changes states in place."""
        nvme = self._resources.nvme
        in_place = any(block.mirror is not None for block, _ in self.blocks())
        if self._resources.commits is None or nvme is None or in_place or not self._collectives.is_alone:
            return None
        if not nvme.slots.is_committed:
            # Edited since: the update writes where the edit is.
            return None
        return nvme.slots.state()

    def undo_to(self, slots: SlotState) -> None:
        """An update failed in which nothing that counts was overwritten."""
        if self._resources.nvme is not None:
            self._resources.nvme.slots.restore(slots)

    def update_failed(self) -> None:
        """Some chunks are a step ahead of others: no further step is committed."""
        if self._resources.commits is not None:
            self._resources.commits.fail()

    def edit_failed(self, error: BaseException) -> None:
        """Some states are edited and others not: no further step is committed."""
        if self._resources.commits is not None:
            self._resources.commits.give_up(error)

    def _take_up(self, record: StepRecord, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        KeptChunks(self._resources.ring, self._parts).take_up(list(self.blocks()))
        flats = [flat for unit in self._units for flat in trainable(unit)]
        for (part, training), steps in zip(flats, record.state["steps"], strict=True):
            part.own_changed()
            part.show_at_home()
            training.steps[:] = steps
        self.tracking.put_back(record.state, optimizers)

    def _take_late(self, at_forward: bool) -> dict[str, Any]:  # noqa: FBT001
        """What a commit takes when the user's loop is through with the step."""
        steps = [list(training.steps) for unit in self._units for _, training in trainable(unit)]
        late = {**self.tracking.at_forward(), "steps": steps}
        return {**late, **self.tracking.random_at_forward()} if at_forward else late
