"""What a run holds from the machine: budgets, tiers, rings, windows. Made from the plan, given back together."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerooffload.accelerator import Accelerator
from zerooffload.aio import Engine
from zerooffload.config import OffloadConfig, TierName
from zerooffload.errors import ConfigError, InternalError, TierIOError
from zerooffload.formats import format_bytes
from zerooffload.journal import forget_run, record_capacity
from zerooffload.journal.history import NUM_RECORDS
from zerooffload.machine import available_host_bytes, host_memory_bytes, ranks_of_this_machine
from zerooffload.memory import Budget, Lease
from zerooffload.planner.admission import DEFAULT_PART, AnnouncedPlan, Limits
from zerooffload.planner.block_inputs import HOLDER, NUM_SLOTS, STAGING_HOLDER
from zerooffload.planner.placement import (
    ARRIVALS_HOLDER,
    COUNTER_NBYTES,
    JOURNAL_HOLDER,
    NUM_PARAMETER_SLOTS,
    NUM_STAGING_SLOTS,
    FlatPlacement,
    Placement,
    StatePlacement,
    may_be_shared,
)
from zerooffload.runtime.commits import Commits
from zerooffload.runtime.landing import Landing
from zerooffload.runtime.shared_homes import Sharers
from zerooffload.runtime.storage import Storage
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.telemetry import Recorder, TierUsage, Waits, process_resident_bytes
from zerooffload.tiers import Block, DeviceTier, NvmeTier, StagingRing, Tier, Transfers, host_tier

if TYPE_CHECKING:
    from zerooffload.runtime.activations import ActivationStore
    from zerooffload.runtime.arrivals import Arrivals
    from zerooffload.runtime.saving import Saver

_log = logging.getLogger("zerooffload")


@dataclass(frozen=True)
class Parts:
    """What the pieces of a run share."""

    accelerator: Accelerator
    transfers: Transfers
    waits: Waits
    recorder: Recorder


@dataclass(frozen=True)
class Drive:
    """How the nvme paths are used: makes the engine, and tells the speeds of paths."""

    open_engine: Callable[[], Engine]
    path_speeds: Callable[[Sequence[Path]], list[float]]


def limits_of(config: OffloadConfig, accelerator: Accelerator) -> Limits:
    """The user's bounds; without one, three quarters of what is available now (of the nvme paths, all).

    The ranks of one machine (LOCAL_WORLD_SIZE, as torchrun sets it) share what is available.
    """
    sharing = ranks_of_this_machine()
    host = _host_limit(config, sharing)
    device = config.device_memory
    if device is None:
        device = host if accelerator.shares_host_memory else int(DEFAULT_PART * accelerator.available_bytes())
    nvme = config.nvme_space
    if nvme is None:
        nvme = _free_space(config) // sharing
    return Limits(device, host, nvme, accelerator.shares_host_memory)


def _host_limit(config: OffloadConfig, sharing: int) -> int:
    if config.host_memory is None:
        return int(DEFAULT_PART * available_host_bytes()) // sharing
    machine = host_memory_bytes()
    if config.host_memory > machine:
        _log.warning(
            "host_memory is %s, but this process can have %s at the most: planning with that",
            format_bytes(config.host_memory),
            format_bytes(machine),
        )
    return min(config.host_memory, machine)


def warn_if_memory_is_short(plan: AnnouncedPlan) -> None:
    """Tell if the ranks of this machine together plan with more host memory than they can get now.

    What the process holds already may be the model in memory, which the plan's leases take the place of.
    """
    sharing = ranks_of_this_machine()
    planned = plan.planned_bytes(TierName.HOST) * sharing
    left = available_host_bytes() + process_resident_bytes() * sharing
    if planned > left:
        _log.warning(
            "the plan holds %s of host memory (%d rank%s here), but only %s can be had now:"
            " the kernel may end the process; lower host_memory, or free memory",
            format_bytes(planned),
            sharing,
            "" if sharing == 1 else "s",
            format_bytes(left),
        )


def _free_space(config: OffloadConfig) -> int:
    free = {}
    for path in config.nvme_paths:
        if not path.is_dir():
            raise ConfigError(f"nvme path {path} is not a folder: create it, or name one on the drive")
        free[path.stat().st_dev] = shutil.disk_usage(path).free
    return sum(free.values())


class Resources:
    """Budgets, tiers and rings of a run, leased exactly as announced.

    Attributes
    ----------
    plan : AnnouncedPlan
    tiers : dict[TierName, Tier]
        device, host, and nvme where something lives there.
    host : MemoryTier
        The tier of that name.
    ring, param_ring, gradient_ring : StagingRing
        Of the update, of parameters on their way to the device, and of gradients.
    nvme : NvmeTier or None
        The tier of that name.
    open_engine : callable
        Makes an engine for files elsewhere.
    sharers : Sharers
        Who has shared homes in one memory with this rank.
    arrival_counters : list[torch.Tensor]
        Of each of them, int64, shared; none where no flat needs them.
    saver : Saver or None
        Set by the run that takes these. A save that is under way is finished before anything is given back.
    landing : Landing or None
        Set by the run that takes these. Ended first: it uses a ring.
    updates : UpdateQueue or None
        Set by the run that takes these. Ended next.
    block_inputs : ActivationStore or None
        Set by the run that takes these. Ended with the landing.
    block_input_leases : dict[TierName, Lease]
        What is set aside for them.
    arrivals : Arrivals or None
        Set by the run that takes these. Ended before memory is given back.
    commits : Commits or None
        Where steps are committed: set once the run has begun. Finished before anything is given back.
    """

    def __init__(
        self,
        plan: AnnouncedPlan,
        config: OffloadConfig,
        parts: Parts,
        drive: Drive,
        storage: Storage | None,
        *,
        sharers: Sharers,
    ) -> None:
        self.plan = plan
        self.open_engine = drive.open_engine
        self.saver: Saver | None = None
        self._accelerator = parts.accelerator
        self.sharers = sharers
        self.arrivals: Arrivals | None = None
        self.arrival_counters: list[torch.Tensor] = []
        self.nvme: NvmeTier | None = None
        self.landing: Landing | None = None
        self.updates: UpdateQueue | None = None
        self.commits: Commits | None = None
        self.block_inputs: ActivationStore | None = None
        self.block_input_leases: dict[TierName, Lease] = {}
        self.budgets = _budgets(plan.limits)
        device, host, nvme = self.budgets.values()
        self.tiers: dict[TierName, Tier] = {}
        self._leases: list[Lease] = []
        self._pinned: list[torch.Tensor] = []
        self._windows: list[Lease] = []
        self._rings: list[StagingRing] = []
        try:
            self._device = DeviceTier(device, parts.accelerator, parts.transfers)
            self.tiers[TierName.DEVICE] = self._device
            self.tiers[TierName.HOST] = self.host = host_tier(host, parts.accelerator, parts.transfers)
            if storage is not None:
                self.nvme = NvmeTier(
                    storage.directories,
                    nvme,
                    drive.open_engine(),
                    parts.recorder,
                    speeds=drive.path_speeds(config.nvme_paths),
                    kept=storage.places,
                    checks_reads=config.verify_reads,
                )
                self.tiers[TierName.NVME] = self.nvme
            placement = plan.placement
            self._map_shared(placement)
            if placement.commits_steps:
                nbytes = record_capacity(placement.num_kept_chunks)
                self._leases.append(host.lease(nbytes, JOURNAL_HOLDER))
                self._leases.append(nvme.lease(NUM_RECORDS * nbytes, JOURNAL_HOLDER))
            self.ring = self._make_ring(
                "staging ring", NUM_STAGING_SLOTS, placement.slot_nbytes, parts, num_cached=plan.num_cached_slots
            )
            self.param_ring = self._make_ring(
                "parameter staging", NUM_PARAMETER_SLOTS, placement.param_slot_nbytes, parts
            )
            self.gradient_ring = self._make_ring(
                "gradient staging", placement.num_gradient_slots, placement.gradient_slot_nbytes, parts
            )
            self.block_input_ring = self._make_ring(
                STAGING_HOLDER, NUM_SLOTS, placement.block_inputs.slot_nbytes, parts
            )
            for claim in placement.block_inputs.claims:
                if claim.holder != STAGING_HOLDER:
                    lease = self.budgets[claim.tier].lease(claim.nbytes, claim.holder)
                    self._leases.append(lease)
                    if claim.holder == HOLDER:
                        self.block_input_leases[claim.tier] = lease
            if self.nvme is not None:
                for ring in self._rings:
                    for buffer in ring.buffers:
                        self.nvme.engine.register(buffer)
            for holder, nbytes in (
                ("parameters in use", plan.window_nbytes),
                ("gradient collection", plan.collection_nbytes),
            ):
                self._windows.append(device.lease(nbytes, holder))
        except BaseException:
            self.close()
            raise

    def _map_shared(self, placement: Placement) -> None:
        if self.sharers.pages is not None:
            self.sharers.pages.map(placement.shared_nbytes)
        if placement.num_arrival_counters:
            self._leases.append(self.budgets[TierName.HOST].lease(COUNTER_NBYTES, ARRIVALS_HOLDER))

    def _make_ring(
        self, holder: str, num_slots: int, slot_nbytes: int, parts: Parts, *, num_cached: int = 0
    ) -> StagingRing:
        host = self.budgets[TierName.HOST]
        ring = StagingRing(holder, num_slots, slot_nbytes, host, parts.accelerator, num_cached=num_cached)
        self._rings.append(ring)
        return ring

    def sharers_of(self, flat: FlatPlacement) -> tuple[int, ...]:
        """Ranks that have its parameters' home in one memory with this one, or this one; none if no rank shares its."""
        may_be = may_be_shared(flat, self.plan.placement.reach)
        return self.sharers.ranks if may_be else ()

    def share(self, state: StatePlacement) -> Block:
        """The home of a state that ranks have in one memory; they take them in one order.

        Raises
        ------
        BudgetError
            If this rank's part does not fit the host's budget.
        """
        if self.sharers.pages is None:
            raise InternalError(f"{state.name} is shared, but there is no memory for it")
        memory = self.sharers.pages.take(state.layout.memory_nbytes)
        if self._accelerator.pin(memory):
            self._pinned.append(memory)
        return self.host.share(state.layout, state.holder, memory, state.num_sharers, state.name)

    def reserve(self) -> None:
        """Take the space of all blocks; then hold the run to its plan.

        Raises
        ------
        TierIOError
            If the space is not there.
        """
        for tier in self.tiers.values():
            tier.reserve()
        if self.sharers.pages is not None:
            # Behind all homes: the pages' first bytes are not zero.
            for _ in range(self.plan.placement.num_arrival_counters):
                self.arrival_counters.append(self.sharers.pages.take(COUNTER_NBYTES).view(torch.int64))
        for name, budget in self.budgets.items():
            planned = self.plan.planned_bytes(name)
            if budget.leased_bytes != planned:
                raise InternalError(f"{name.value}: {budget.leased_bytes} bytes leased, {planned} announced")

    def leave_device(self) -> None:
        """Give the device's memory back for a while; its windows are empty, and nobody uses what lives there.

        Raises
        ------
        BudgetError
            If the host has no room for what lives there; nothing has changed then.
        """
        self._device.leave(self.budgets[TierName.HOST])
        for lease in self._windows:
            lease.release()

    def come_back_to_device(self) -> None:
        """Undo `leave_device`."""
        for lease in self._windows:
            lease.renew()
        self._device.come_back()

    def usage(self) -> tuple[TierUsage, ...]:
        """Each tier's budget, plan and leases."""
        return tuple(
            TierUsage(
                name=name.value,
                budget_bytes=budget.limit_bytes,
                planned_bytes=self.plan.planned_bytes(name),
                leased_bytes=budget.leased_bytes,
                peak_bytes=budget.peak_bytes,
            )
            for name, budget in self.budgets.items()
        )

    def close(self) -> None:
        """Give everything back; again is harmless.

        Raises
        ------
        ZeroOffloadError
            If the last step could not be committed; everything is given back all the same.
        """
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.close()
        landing, self.landing = self.landing, None
        updates, self.updates = self.updates, None
        commits, self.commits = self.commits, None
        block_inputs, self.block_inputs = self.block_inputs, None
        arrivals, self.arrivals = self.arrivals, None
        try:
            if block_inputs is not None:
                block_inputs.close()
            if arrivals is not None:
                arrivals.close()
            if landing is not None:
                landing.abandon()
            if updates is not None:
                updates.close()
            if commits is not None:
                commits.close()
        finally:
            if self.nvme is not None:
                self.nvme.keeps_files |= commits is not None and commits.may_be_needed
                if not self.nvme.keeps_files:
                    _forget([directory.path for directory in self.nvme.directories if directory.is_held])
            self._give_back()

    def _give_back(self) -> None:
        try:
            # What was begun for nobody may still be copied from homes.
            for queue in (self._accelerator.copy_in, self._accelerator.copy_out):
                self._accelerator.record(queue).wait()
        finally:
            # Tiers first: closing an engine finishes what is in flight to the rings' memory.
            for tier in reversed(self.tiers.values()):
                tier.close()
            for ring in self._rings:
                ring.close()
            pinned, self._pinned = self._pinned, []
            for memory in pinned:
                self._accelerator.unpin(memory)
            for lease in (*self._leases, *self._windows):
                lease.release()


def _budgets(limits: Limits) -> dict[TierName, Budget]:
    host = Budget(TierName.HOST.value, limits.host_bytes)
    device = Budget(TierName.DEVICE.value, limits.device_bytes, host if limits.device_shares_host else None)
    nvme = Budget(TierName.NVME.value, limits.nvme_bytes)
    return {TierName.DEVICE: device, TierName.HOST: host, TierName.NVME: nvme}


def _forget(directories: list[Path]) -> None:
    """Forget a run that finished no step. If its files stay, the next run begins all the same."""
    try:
        forget_run(directories)
    except TierIOError as error:
        _log.warning("%s", error)
