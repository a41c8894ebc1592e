"""Tiers that are memory, and the host's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerooffload.accelerator import Accelerator, host_buffer_nbytes, shared_part_nbytes
from zerooffload.config import TierName
from zerooffload.errors import InternalError
from zerooffload.memory import Budget, Lease
from zerooffload.telemetry import Wait, Waitable
from zerooffload.tiers.api import Block, Kept, Space
from zerooffload.tiers.records import RecordLayout
from zerooffload.tiers.transfers import Transfers


class MemoryBlock:
    """Records in memory; see `Block`.

    Parameters
    ----------
    places : Sequence[torch.Tensor]
        Memory for all records, once or twice.
    """

    mirror: Block | None = None

    def __init__(
        self,
        layout: RecordLayout,
        places: Sequence[torch.Tensor],
        spaces: frozenset[Space],
        transfers: Transfers,
        *,
        name: str = "",
    ) -> None:
        self.name = name
        self.layout = layout
        self.needs_device = Space.HOST not in spaces
        self.num_places = len(places)
        self._places = list(places)
        self._current = dict.fromkeys(layout.chunks, 0)
        self._spaces = spaces
        self._transfers = transfers

    def view(self, space: Space, chunk: int) -> torch.Tensor | None:
        """The record itself."""
        return self._record(chunk) if space in self._spaces else None

    def whole(self, space: Space) -> torch.Tensor | None:
        """All the memory; with second places the records lie here and there."""
        return self._places[0] if space in self._spaces and self.num_places == 1 else None

    def version(self, chunk: int) -> int | None:  # noqa: ARG002 - the protocol's
        """Memory can be written to in place."""
        return None

    def read(self, chunk: int, target: torch.Tensor) -> Waitable:
        """Copy to the host, behind what compute has been given."""
        record = self._record(chunk)
        return self._transfers.to_host(target[: record.numel()], record, Wait.STATE_COPY, f"{self.name} #{chunk}")

    def write(self, chunk: int, source: torch.Tensor) -> Waitable:
        """Copy from the host, behind what compute has been given: it may still read the old content."""
        record, used = self._record(chunk), self._transfers.compute_done()
        name = f"{self.name} #{chunk}"
        return self._transfers.to_device(record, source[: record.numel()], used, Wait.STATE_COPY, name=name)

    def initialize(self, chunk: int, source: torch.Tensor) -> Waitable:
        """A write like any other."""
        return self.write(chunk, source)

    def may_write_ahead(self, chunk: int) -> bool:  # noqa: ARG002 - the protocol's
        """If there is a second place."""
        return self.num_places > 1

    def view_ahead(self, chunk: int) -> torch.Tensor:
        """The record of the other place."""
        return self._record(chunk, ahead=True)

    def write_ahead(self, chunk: int, source: torch.Tensor) -> Waitable:  # noqa: ARG002
        """Never asked for."""
        raise InternalError("a record in memory is updated there")

    def take_ahead(self, chunk: int) -> None:
        """Let the places change roles."""
        self._current[chunk] = 1 - self._current[chunk]

    def drop_ahead(self, chunk: int) -> None:
        """The other place's content never counted."""

    def close(self) -> None:
        """Give the memory back, but for what parameters show of it; nothing else can be done with the block then."""
        self._places.clear()

    def _record(self, chunk: int, *, ahead: bool = False) -> torch.Tensor:
        offset = self.layout.record_offset(chunk)
        place = self._places[self._current[chunk] ^ ahead]
        return place[offset : offset + self.layout.record_nbytes(chunk)]


class MemoryTier:
    """A tier whose blocks are tensors; see `Tier`."""

    def __init__(
        self,
        name: TierName,
        budget: Budget,
        transfers: Transfers,
        *,
        spaces: frozenset[Space],
        rounded_nbytes: Callable[[int], int],
        take_memory: Callable[[int], torch.Tensor],
    ) -> None:
        self.name = name
        self.budget = budget
        self._transfers = transfers
        self._spaces = spaces
        self._rounded_nbytes = rounded_nbytes
        self._take_memory = take_memory
        self._leases: list[Lease] = []
        self._blocks: list[MemoryBlock] = []

    def block_nbytes(self, layout: RecordLayout, kept: Kept | None = None, num_places: int = 1) -> int:  # noqa: ARG002 - memory keeps nothing
        """As the allocator rounds it, for each place."""
        return num_places * self._rounded_nbytes(layout.memory_nbytes) if layout.memory_nbytes else 0

    def allocate(
        self,
        layout: RecordLayout,
        holder: str,
        kept: Kept | None = None,  # noqa: ARG002 - memory keeps nothing
        *,
        name: str = "",
        num_places: int = 1,
    ) -> MemoryBlock:
        """Memory for all records."""
        self._leases.append(self.budget.lease(self.block_nbytes(layout, num_places=num_places), holder))
        places = [self._take_memory(layout.memory_nbytes) for _ in range(num_places)]
        return self._made(MemoryBlock(layout, places, self._spaces, self._transfers, name=name))

    def share(
        self, layout: RecordLayout, holder: str, memory: torch.Tensor, num_sharers: int, name: str
    ) -> MemoryBlock:
        """A block in memory that so many processes have, each of which leases its part."""
        self._leases.append(self.budget.lease(shared_part_nbytes(memory.numel(), num_sharers), holder))
        return self._made(MemoryBlock(layout, [memory], self._spaces, self._transfers, name=name))

    def _made(self, block: MemoryBlock) -> MemoryBlock:
        self._blocks.append(block)
        return block

    def reserve(self) -> None:
        """Memory is taken when it is allocated."""

    def close(self) -> None:
        """Give memory and leases back, whoever still holds the blocks: runs are cycles, which are collected late."""
        for block in self._blocks:
            block.close()
        self._blocks.clear()
        for lease in self._leases:
            lease.release()
        self._leases.clear()


def host_tier(budget: Budget, accelerator: Accelerator, transfers: Transfers) -> MemoryTier:
    """Host memory, pinned where the device profits."""
    spaces = {Space.HOST, Space.DEVICE} if accelerator.shares_host_memory else {Space.HOST}
    return MemoryTier(
        TierName.HOST,
        budget,
        transfers,
        spaces=frozenset(spaces),
        rounded_nbytes=host_buffer_nbytes,
        take_memory=accelerator.host_buffer,
    )
