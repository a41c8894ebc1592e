"""The tier of device memory, which can be left for a while."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerooffload.accelerator import Accelerator, DeviceRange, host_buffer_nbytes
from zerooffload.config import TierName
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Wait
from zerooffload.tiers.api import Space
from zerooffload.tiers.memory_tier import MemoryTier
from zerooffload.tiers.transfers import Transfers


@dataclass(frozen=True)
class _SetAside:
    """A range's content in host memory."""

    memory: DeviceRange
    copy: torch.Tensor
    lease: Lease


class DeviceTier(MemoryTier):
    """Device memory; on a CPU an alias of the host's."""

    def __init__(self, budget: Budget, accelerator: Accelerator, transfers: Transfers) -> None:
        self._accelerator = accelerator
        self._ranges: list[DeviceRange] = []
        self._set_aside: list[_SetAside] = []
        super().__init__(
            TierName.DEVICE,
            budget,
            transfers,
            spaces=frozenset(Space if accelerator.shares_host_memory else {Space.DEVICE}),
            rounded_nbytes=accelerator.range_nbytes,
            take_memory=self._take_range,
        )

    def leave(self, host: Budget) -> None:
        """Copy all blocks to host memory and give the device's back. Until `come_back` they must not be used.

        Raises
        ------
        BudgetError
            If `host` has no room for them; nothing has changed then.
        """
        if self._accelerator.shares_host_memory:
            return
        with_content = [memory for memory in self._ranges if memory.tensor.numel()]
        leases: list[Lease] = []
        try:
            leases.extend(
                host.lease(host_buffer_nbytes(memory.tensor.numel()), "states set aside") for memory in with_content
            )
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        for memory, lease in zip(with_content, leases, strict=True):
            copy = self._accelerator.host_buffer(memory.tensor.numel())
            self._transfers.to_host(copy, memory.tensor, Wait.STATE_COPY, "state set aside").wait()
            memory.empty()
            self._set_aside.append(_SetAside(memory, copy, lease))
        for lease in self._leases:
            lease.release()

    def come_back(self) -> None:
        """Undo `leave`: the same bytes at the same addresses."""
        if self._accelerator.shares_host_memory:
            return
        for lease in self._leases:
            lease.renew()
        for item in self._set_aside:
            used = self._transfers.compute_done()
            item.memory.fill()
            copied = self._transfers.to_device(
                item.memory.tensor, item.copy, used, Wait.STATE_COPY, name="state set aside"
            )
            copied.wait()
            item.lease.release()
        self._set_aside.clear()

    def close(self) -> None:
        """Also what was set aside."""
        super().close()
        self._ranges.clear()
        for item in self._set_aside:
            item.lease.release()
        self._set_aside.clear()

    def _take_range(self, nbytes: int) -> torch.Tensor:
        memory = self._accelerator.reserve(nbytes)
        memory.fill()
        self._ranges.append(memory)
        # What is written first, the initial states, comes through `copy_in`, as the range demands.
        return memory.tensor
