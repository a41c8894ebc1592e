"""A run: everything of one offloaded model, from `offload` to `close`."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerooffload.checkpoint.manifest import RunEntry
from zerooffload.config import TierName
from zerooffload.errors import ConfigError, ZeroOffloadError
from zerooffload.journal.values import from_json, to_json
from zerooffload.optim.kernels import Kernels
from zerooffload.optim.optimizer import ScalarsOf
from zerooffload.optim.record import OptimizerStates
from zerooffload.optim.rules import RULES, Rule
from zerooffload.optim.stream import StreamedUpdate
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.runtime.ahead import AheadUpdates
from zerooffload.runtime.arrivals import Arrivals
from zerooffload.runtime.clipping import Chosen, choose, clip_factor, norm_sum, scale, total_norm
from zerooffload.runtime.fetch import Fetcher
from zerooffload.runtime.gradient_hooks import hook_gradient
from zerooffload.runtime.gradients import GradientPath
from zerooffload.runtime.home_reads import HomeReads
from zerooffload.runtime.hook_points import HookPoint
from zerooffload.runtime.kept_steps import KeptSteps
from zerooffload.runtime.landing import Landing
from zerooffload.runtime.loading import open_loading
from zerooffload.runtime.logical_states import LogicalStates, StateChunk
from zerooffload.runtime.param_access import ParamAccess
from zerooffload.runtime.residency import Residency
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.runtime.saving import Contents, Saver, SaveTicket
from zerooffload.runtime.schedule import Owner, Schedule
from zerooffload.runtime.snapshots import Snapshots
from zerooffload.runtime.update import plan_update
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.runtime.updating import UpdatePolicy, Updating
from zerooffload.runtime.watching import watched
from zerooffload.sharding.collectives import Collectives, agree
from zerooffload.sharding.registry import Residence, forget, residence_of
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable
from zerooffload.telemetry import Listener, StepReport, Work, process_peak_bytes
from zerooffload.telemetry.recorder import CountingRecorder, Counts
from zerooffload.tiers import SlotState, Space


class Run:
    """Joins the parts; implements `OptimizerRun` for the optimizer.

    Parameters
    ----------
    kernels : tuple[Kernels, Kernels]
        For host memory, and for the device's.

    Attributes
    ----------
    micro_batch_size : int or None
        Samples of a slice, where blocks run in slices.
    plan : AnnouncedPlan
        What it leases.
    update_mode : ModeChooser
        Chooses when updates run; it may be told another aim between two steps.
    kept : KeptSteps
        What of it outlives it.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        points: Sequence[HookPoint],
        plan: AnnouncedPlan,
        states: OptimizerStates,
        resources: Resources,
        parts: Parts,
        kernels: tuple[Kernels, Kernels],
        collectives: Collectives,
        policy: UpdatePolicy,
        baseline_bytes: int,
    ) -> None:
        self.units = tuple(units)
        self.plan = plan
        self.update_mode = policy.mode
        self.backwards = policy.backwards
        self.accelerator = parts.accelerator
        self.micro_batch_size: int | None = None
        self._points = tuple(points)
        self._states = states
        self._resources = resources
        self._parts = parts
        self._collectives = collectives
        self._failure: BaseException | None = None
        self._what_failed = "an update"
        self._is_closed = False
        self._is_off_device = False
        self._owner = os.getpid()
        self._handles: list[RemovableHandle] = []
        self._at_close: list[Callable[[], None]] = []
        by_space = {Space.HOST: kernels[0], Space.DEVICE: kernels[1]}
        self._snapshots = snapshots = Snapshots(parts.waits)
        self._home_reads = home_reads = HomeReads(parts.waits, collectives, snapshots)
        stream = StreamedUpdate(
            by_space, resources.ring, parts.waits, parts.recorder, before_change=home_reads.before_change
        )
        self._landing = Landing(
            shares_host_memory=parts.accelerator.shares_host_memory,
            host_kernels=kernels[0],
            device_kernels=kernels[1],
            ring=resources.gradient_ring,
            transfers=parts.transfers,
            waits=parts.waits,
            recorder=parts.recorder,
        )
        resources.landing = self._landing
        self._updates = updates = UpdateQueue(
            stream,
            parts.waits,
            gradient_written=self._landing.write_of,
            in_background=parts.recorder.in_background,
        )
        resources.updates = updates
        resources.arrivals = arrivals = Arrivals(resources.arrival_counters, resources.sharers, parts)
        fetcher = Fetcher(
            parts.accelerator,
            parts.transfers,
            resources.param_ring,
            parts.waits,
            updates,
            home_reads=home_reads,
            arrivals=arrivals,
            reads_device=resources.nvme is not None and resources.nvme.reads_device,
        )
        evicts = plan.window_nbytes < plan.placement.window.most_nbytes
        self._residency = Residency(plan.window_nbytes, fetcher, collectives, parts.accelerator, updates, evicts=evicts)
        self.kept = KeptSteps(self.units, resources, parts, collectives)
        ahead = AheadUpdates(updates, self._landing, self.kept.tracking.optimizers)
        self._updating = Updating(updates, ahead, policy, resources.ring, parts)
        self._gradients = GradientPath(
            plan.collection_nbytes,
            self._landing,
            collectives,
            self.units,
            parts,
            changed=lambda part: updates.drop_ahead([part]),
            is_complete=ahead.gradient_is_complete,
        )
        self._schedule = Schedule(
            self._points, self._residency, self._gradients, self._moments(), recorder=parts.recorder
        )
        self.access = ParamAccess(
            residency=self._residency,
            gradients=self._gradients,
            collectives=collectives,
            resources=resources,
            parts=parts,
            rule=RULES[states.algorithm],
            updates=self._updates,
            snapshots=snapshots,
            home_reads=home_reads,
            ended_half_way=partial(self._ended_half_way, "an edit"),
        )
        self._saver = Saver(
            self.units, states, resources=resources, parts=parts, collectives=collectives, snapshots=snapshots
        )
        resources.saver = self._saver
        self._baseline_bytes = baseline_bytes
        self._num_steps = 0
        self._step_began = time.perf_counter()
        self._report: StepReport | None = None
        # At a normal exit and when the run is collected; must not hold the run itself.
        self._release = weakref.finalize(self, _close_when_gone, resources, os.getpid(), threading.current_thread())

    def install(self) -> None:
        """Put all hooks in place."""
        for point in self._points:
            handles = point.install(self._schedule)
            if not self.moves:
                # Else the hooks stay after the end, and raise: the values that moved are gone.
                self._handles += handles
        for unit in self.units:
            for part, training in trainable(unit):
                for index in range(len(part.flat.params)):
                    self._handles += hook_gradient(self._schedule, unit, part, training, index)

    def track(self, objects: Mapping[str, Any]) -> None:
        """See `zo.track`."""
        self.kept.tracking.track(objects)

    def resume(self, optimizers: Sequence[torch.optim.Optimizer]) -> int:
        """See `zo.resume`."""
        self._check_alive()
        self._num_steps = self.kept.resume(optimizers, self._num_steps)
        return self._num_steps

    def save(
        self,
        directory: Path,
        optimizers: Sequence[torch.optim.Optimizer],
        extra: Any,
        *,
        keep_last: int | None,
        blocking: bool,
    ) -> SaveTicket:
        """See `zo.save`."""
        self._check_usable()
        if self.access.is_open:
            raise ConfigError("parameters may be edited inside of zo.full_params: call zo.save outside of it")
        self._updates.drop_ahead()
        if blocking:
            self._updates.finish()
        state = RunEntry(**self.kept.tracking.now(optimizers))
        contents = Contents(self._num_steps, state, to_json(extra, "extra"))
        hidden = self._updates.hidden_jobs()
        return self._saver.save(directory, contents, hidden, keep_last=keep_last, blocking=blocking)

    def load(self, directory: Path, optimizers: Sequence[torch.optim.Optimizer]) -> Any:
        """See `zo.load`."""
        self.empty_for("zo.load")
        ranks, resources, parts = self._collectives, self._resources, self._parts
        with open_loading(directory, self.units, self._states, ranks, resources=resources, parts=parts) as loading:
            take_over = partial(self.kept.take_over, optimizers=optimizers)
            agree(ranks, lambda: loading.put_back(take_over), "loading a checkpoint")
            self.refill(loading.fill, loading.manifest.step)
            return from_json(loading.manifest.extra)

    def empty_for(self, call: str) -> None:
        """Let nothing but the homes hold states, which `refill` may replace then.

        Raises
        ------
        ConfigError
            If the model is in use; `call` is for the message.
        """
        self.check_idle(call)
        self._saver.finish()
        self._updates.drop_ahead()
        self._updates.wait_idle()
        self._gradients.drain()
        self._residency.send_home()
        self._home_reads.finish()
        self._home_reads.let_shared_change(part for unit in self.units for part in unit.parts)

    def refill(self, fill: Callable[[], None], num_steps: int) -> None:
        """Let `fill` replace what the homes hold by states after `num_steps` steps, and forget gradients. Collective.

        What it raises ends the run: the states are neither old nor new then.
        """
        try:
            agree(self._collectives, fill, "loading a checkpoint")
        except BaseException as error:
            self._ended_half_way("a load", error)
            raise
        self._num_steps = num_steps
        params = [param for unit in self.units for param in unit.parameters()]
        for param in params:
            param.grad = None
        self.discard_gradients(params)

    def _moments(self) -> Owner:
        updating = self._updating
        return Owner(self._check_usable, self.kept.training_begins, updating.backward_begins, updating.backward_raised)

    def values_are_wanted(self, residence: Residence) -> None:
        """An operation is about to use a parameter that no module in use is known to need.

        Raises
        ------
        ConfigError
            Outside of the model's forward and backward.
        """
        self._check_usable()
        if not self._schedule.values_are_wanted(residence.unit):
            name = residence.part.flat.layout.slots[residence.slot_index].param.name
            raise ConfigError(
                f"parameter {name} was used outside of the model's forward, while its values are on their tier: read or"
                " write it inside zo.full_params(module), compute with it in the forward of a module, and let an"
                " optimizer of ours (zo.AdamW, ...) update it"
            )

    def adopt(self, optimizer: torch.optim.Optimizer, rule: Rule) -> None:
        """See `OptimizerRun`."""
        if rule.moments != RULES[self._states.algorithm].moments:
            raise ConfigError(
                f"the states were laid out for {self._states.algorithm}, not for {rule.name}:"
                f' call zo.offload with OffloadConfig(algorithm="{rule.name}")'
            )
        self.kept.tracking.take_optimizer(optimizer)

    def update(self, scalars_of: ScalarsOf) -> None:
        """See `OptimizerRun`."""
        self._check_usable()
        self._schedule.recover()
        self._updates.finish()
        planned = plan_update(self.units, scalars_of)
        self._residency.send_home()
        self._home_reads.let_shared_change(part for unit in self.units for part, _ in trainable(unit))
        state = self.kept.step_begins()
        before = self.kept.slots()
        try:
            if self._updating.hides:
                # Each update waits for the writes of its own gradients.
                self._gradients.settle()
            else:
                self._gradients.drain()
            left = self._updating.run_now(planned)
            # From here on nothing can be undone.
            before = None
            written = self._updating.hide(left, self._schedule.forward_order)
        except BaseException as error:
            self._end_half_way(error, before)
            raise
        for update in planned:
            update.count()
        self._num_steps += 1
        self.kept.commit(self._num_steps, state, written)
        self._updating.step_is_over()
        self._make_report()

    def _end_half_way(self, error: BaseException, before: SlotState | None) -> None:
        """An update failed: with two slots nothing has happened, else some chunks are a step ahead of others."""
        if before is not None:
            self.kept.undo_to(before)
            return
        self._failure = error
        self.kept.update_failed()

    def _ended_half_way(self, what: str, error: BaseException) -> None:
        self._failure, self._what_failed = error, what
        self.kept.edit_failed(error)

    def release_device(self) -> None:
        """See `zo.release_device`."""
        self.check_idle("zo.release_device")
        self._updates.finish()
        self._gradients.drain()
        self._residency.send_home()
        self._resources.leave_device()
        for unit in self.units:
            unit.leave_device()
        self._is_off_device = True
        self._parts.accelerator.trim()

    def reclaim_device(self) -> None:
        """See `zo.reclaim_device`."""
        self._check_alive()
        if not self._is_off_device:
            return
        self._resources.come_back_to_device()
        for unit in self.units:
            unit.come_back_to_device()
        self._is_off_device = False

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._parts.accelerator.device

    def clip_grad_norm(
        self, params: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """See `zo.clip_grad_norm_`."""
        chosen, norm = self._norm_of(params, norm_type)
        result = torch.tensor(norm, dtype=torch.float32, device=self._parts.accelerator.device)
        if error_if_nonfinite and not bool(result.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} is {norm}, so gradients cannot be clipped; pass"
                " error_if_nonfinite=False to go on regardless"
            )
        factor = clip_factor(norm, max_norm)
        scale(chosen, factor)
        self._updating.gradients_are_clipped(factor, max_norm if norm_type == 2.0 else math.inf)
        return result

    def unscale_gradients(self, params: Iterable[torch.Tensor], factor: float) -> bool:
        """See `OptimizerRun`."""
        chosen, norm = self._norm_of(params, norm_type=2.0)
        scale(chosen, factor)
        self._updating.gradients_are_unscaled(factor)
        return math.isfinite(norm)

    def skip_step(self) -> None:
        """See `OptimizerRun`."""
        self._updating.step_is_over(was_skipped=True)
        self._make_report()

    def discard_gradients(self, params: Iterable[torch.Tensor]) -> None:
        """See `OptimizerRun`."""
        self.backwards.discarded()
        for param in params:
            residence = residence_of(param)
            if residence is not None:
                self._gradients.discard(residence.part, residence.slot_index)

    def logical_states(
        self, chunks: Sequence[StateChunk], states: Collection[str] | None = None, *, alone: bool = False
    ) -> LogicalStates:
        """A way to read and write state chunks as they are after the last step; see `LogicalStates`.

        Parameters
        ----------
        alone : bool
            The model is not used before the end of it, so the run's own staging ring serves.

        Raises
        ------
        BudgetError
            If the host has no room for what is under way.
        TierIOError
            If a hidden update failed.
        """
        self._check_usable()
        self._updates.drop_ahead()
        self._updates.wait_idle()
        if alone:
            self._residency.settle()
        return LogicalStates(
            chunks,
            self._resources.budgets[TierName.HOST],
            self._parts,
            states=states,
            ring=self._resources.ring if alone else None,
        )

    def read_optimizer_state(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """See `OptimizerRun`."""
        self._check_usable()
        return self.access.read_optimizer_state(param)

    def forget_optimizer_state(self, param: nn.Parameter) -> None:
        """See `OptimizerRun`."""
        self._check_alive()
        self.access.forget_optimizer_state(param)

    def write_optimizer_states(self, states: Sequence[tuple[nn.Parameter, Mapping[str, Any] | None]]) -> None:
        """See `OptimizerRun`."""
        self._check_usable()
        self.access.write_optimizer_states(states)

    def report(self) -> StepReport:
        """See `zo.step_report`."""
        if self._report is None:
            raise ConfigError("no optimizer.step() has finished yet: there is nothing to report")
        return self._report

    def watch(self, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """See `zo.trace`."""
        self._check_alive()
        return watched(self._parts, self._resources, self._residency, listeners)

    @property
    def global_rank(self) -> int:
        """In the whole job."""
        return self._collectives.global_rank

    def close(self) -> None:
        """Give everything back; again is harmless. Parameters that moved are not usable afterwards."""
        if self._is_closed:
            return
        has_told, failure = self._updates.has_told, None
        try:
            if os.getpid() == self._owner:
                self._updates.finish()
                self._leave_device()
        except Exception as error:  # noqa: BLE001 - raised below, when everything is given back
            failure = None if has_told else error
        # Not before: after Ctrl-C it can be called again.
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for action in self._at_close:
            action()
        for unit in self.units:
            forget(unit)
            for param in unit.parameters():
                param.grad = None
        try:
            if self._release.detach() is not None:
                _close_by_owner(self._resources, self._owner)
        except Exception as error:
            # The step of a hidden update that failed cannot be committed; that is told once.
            if not has_told or error is not self._updates.failure:
                raise
        if failure is not None:
            raise failure

    def _leave_device(self) -> None:
        """Give the device's memory back now, not when the run is collected; after a failure it goes with the run."""
        with suppress(ZeroOffloadError):
            self._gradients.give_back()
            self._residency.close()

    @property
    def rule(self) -> Rule:
        """Of the optimizer that the states were laid out for."""
        return RULES[self._states.algorithm]

    @property
    def collectives(self) -> Collectives:
        """Of the ranks that train the model."""
        return self._collectives

    @property
    def moves(self) -> bool:
        """Whether values of parameters are away from the device, and so gone when the run ends."""
        return any(part.can_be_away for unit in self.units for part in unit.parts)

    def at_close(self, action: Callable[[], None]) -> None:
        """Let `action` run when the run ends."""
        self._at_close.append(action)

    def keep_hook(self, handle: RemovableHandle) -> None:
        """Remove a hook when the run ends."""
        self._handles.append(handle)

    def _norm_of(self, params: Iterable[torch.Tensor], norm_type: float) -> tuple[list[Chosen], float]:
        """Where the gradients of these parameters are, all arrived, and their norm over all ranks."""
        self._check_usable()
        self._schedule.recover()
        chosen = choose(params, self)
        # What no gradient holds is zeroed in place: a step of another optimizer may still be reading it.
        self._updates.finish()
        self._gradients.settle()
        with self._parts.recorder.working(Work.GRADIENT_NORM, "of the model"):
            mine = norm_sum(chosen, norm_type, self._landing.square_sums, self._read_gradient)
            of_parts = self._collectives.gather_of_parts(self._collectives.gather_of_shards(mine))
            return chosen, total_norm([of_shard for of_part in of_parts for of_shard in of_part], norm_type)

    def _read_gradient(self, part: UnitFlat, training: TrainingStates, index: int) -> torch.Tensor:
        self._gradients.drain()
        return self.access.read_gradient_piece(part, training, index)

    def _check_usable(self) -> None:
        self.kept.check_resumed()
        self._check_alive()
        self.check_on_device()

    def check_idle(self, call: str) -> None:
        """See that nothing uses the model.

        Raises
        ------
        ConfigError
            Inside of its forward and backward and of `full_params`.
        """
        self._check_usable()
        self._schedule.recover()
        if self._schedule.is_under_way or self.access.is_open:
            raise ConfigError(
                f"the model is in use: call {call} outside of its forward and backward and of zo.full_params"
            )

    def check_on_device(self) -> None:
        """See that the run may use the device.

        Raises
        ------
        ConfigError
            Between `zo.release_device` and `zo.reclaim_device`.
        """
        if self._is_off_device:
            raise ConfigError("the model has left the device: call zo.reclaim_device(model) before it is used again")

    def _check_alive(self) -> None:
        if self._is_closed:
            raise ConfigError("the run was ended by zo.close(model): its states are gone")
        if self._failure is None and self._updates.failure is not None:
            self._failure = self._updates.failure
            if not self._updates.has_told:
                self._updates.has_told = True
                raise self._failure
        if self._failure is not None:
            raise ConfigError(
                f"the run cannot go on: {self._what_failed} ended half-way"
                f" ({type(self._failure).__name__}: {self._failure}); start again"
            ) from self._failure

    def _make_report(self) -> None:
        now = time.perf_counter()
        recorder = self._parts.recorder
        counts = recorder.take() if isinstance(recorder, CountingRecorder) else Counts()
        self._report = StepReport(
            step=self._num_steps,
            seconds=now - self._step_began,
            bytes_moved=counts.bytes_moved,
            waits=counts.waits,
            work=counts.work,
            hidden_work=counts.hidden_work,
            busy=counts.busy,
            tiers=self._resources.usage(),
            baseline_bytes=self._baseline_bytes,
            process_peak_bytes=process_peak_bytes(),
            committed_step=self.kept.step,
        )
        self._step_began = now
        recorder.step_ended(self._report, now)


def _close_by_owner(resources: Resources, owner: int) -> None:
    """Give resources back, unless this is a forked child: the files and the engine's threads are its parent's."""
    if os.getpid() == owner:
        resources.close()


def _close_when_gone(resources: Resources, owner: int, maker: threading.Thread) -> None:
    """Give resources back for a run that was collected, or at the end of the process.

    The garbage collector may run on a thread that works for the run: to close there would be to wait for oneself.
    """
    if threading.current_thread() in {maker, threading.main_thread()}:
        _close_by_owner(resources, owner)
        return
    with suppress(RuntimeError):
        # No thread can be started when the process ends; then the system takes everything back.
        threading.Thread(target=_close_by_owner, args=(resources, owner), name="zerooffload-close").start()
