"""The protocol of a tier.

1. `block_nbytes` tells, before anything exists, what a block will take; the plan adds these up.
2. `allocate` leases that from the tier's budget and makes the block; its contents are undefined.
3. `reserve`, once all blocks are allocated and before any is used, makes sure that their space is there.
4. Whoever wants a record asks `view` for it in the space where it computes. A view is the state itself: writing to it
   is enough. Without one, `read` brings the record to host memory and `write` takes it home; the bytes in flight belong
   to the returned `Waitable`.
5. `close` gives everything back.

[Note: ahead]
A record that has a second place can be written *ahead*: the new content lies beside the old, which stays the record
until `take_ahead`. So an update can be made before it is known whether it is the one that is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch

from zerooffload.config import TierName
from zerooffload.memory import Budget
from zerooffload.telemetry import Waitable
from zerooffload.tiers.records import RecordLayout


class Space(Enum):
    """Where computing can address bytes. Where the device shares host memory, a block is in both."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class Kept:
    """That a block's contents outlive the run where its home can: by which name, and in how many slots a chunk.

    Attributes
    ----------
    shards : range or None
        Which of the block's shards do; None for all. The others have one slot.
    """

    name: str
    num_slots: int
    shards: range | None = None

    def part_of(self, layout: RecordLayout) -> RecordLayout:
        """The records of a block of that layout that outlive the run."""
        return layout if self.shards is None else replace(layout, shards=self.shards)


class Block(Protocol):
    """The records of a flat buffer's shards, one or more, in their home.

    Attributes
    ----------
    name : str
        Of the flat buffer and the state, for timelines.
    mirror : Block or None
        A copy on files that must follow every change of a record.
    num_places : int
        Of each record; see [Note: ahead].
    needs_device : bool
        Whether `read` and `write` take the device's copy queues, which only the thread that trains gives work to.
    """

    name: str
    layout: RecordLayout
    mirror: Block | None
    num_places: int
    needs_device: bool

    def view(self, space: Space, chunk: int) -> torch.Tensor | None:
        """The record in place, uint8 `[record_nbytes]`, or None where `space` cannot address it."""

    def whole(self, space: Space) -> torch.Tensor | None:
        """All records of a one-part layout in place, uint8 1D, or None where `space` cannot address them."""

    def version(self, chunk: int) -> int | None:
        """Changes with every write of the record; None where it may change without one."""

    def read(self, chunk: int, target: torch.Tensor) -> Waitable:
        """Start bringing a record to host memory, uint8 `[file_nbytes]`."""

    def write(self, chunk: int, source: torch.Tensor) -> Waitable:
        """Start taking a record home from host memory, uint8 `[file_nbytes]`."""

    def initialize(self, chunk: int, source: torch.Tensor) -> Waitable:
        """The first `write` of a record, before training."""

    def may_write_ahead(self, chunk: int) -> bool:
        """Whether the record has a second place, free to be written to; see [Note: ahead].

        Raises
        ------
        TierIOError, RankError
            If what the place holds could not be committed.
        """

    def view_ahead(self, chunk: int) -> torch.Tensor:
        """The second place, where `view` shows the record in place: uint8 `[record_nbytes]`."""

    def write_ahead(self, chunk: int, source: torch.Tensor) -> Waitable:
        """Start a `write` to the second place, where `view` does not."""

    def take_ahead(self, chunk: int) -> None:
        """What was written ahead is the record from now on."""

    def drop_ahead(self, chunk: int) -> None:
        """What was written ahead, or may have been, does not count."""


class Tier(Protocol):
    """A kind of memory with a budget."""

    name: TierName
    budget: Budget

    def block_nbytes(self, layout: RecordLayout, kept: Kept | None = None, num_places: int = 1) -> int:
        """What a block takes from the budget."""

    def allocate(
        self, layout: RecordLayout, holder: str, kept: Kept | None = None, *, name: str = "", num_places: int = 1
    ) -> Block:
        """Make a block.

        Parameters
        ----------
        holder : str
            For the lease.
        kept : Kept, optional
            Default: the contents are gone with the run. Memory keeps nothing.
        name : str
            Of the block.
        num_places : int
            Of each record of what is not kept, 1 or 2; see [Note: ahead].

        Raises
        ------
        BudgetError
            If it does not fit the budget.
        """

    def reserve(self) -> None:
        """Take the space of all blocks, where that was not done one by one.

        Raises
        ------
        TierIOError
            If it is not there.
        """

    def close(self) -> None:
        """Give back all memory, files and leases; again is harmless."""
