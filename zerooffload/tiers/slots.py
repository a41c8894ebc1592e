"""Which slot of every kept chunk holds its newest content, and which the newest committed step names.

[Note: two slots]
A chunk whose content outlives the run has two places on its file. A committed step names one of them for each chunk;
only the other is written to, so whatever happens the named content stays as it was. When every rank has committed the
next step, that one's names count, and the roles change. Writes wait for that: see `SlotTable.make_room`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SlotState:
    """For every kept chunk, in the order of the table: its slot, uint8, and the checksum of what is there, uint64."""

    slots: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]


class SlotTable:
    """The slots of all kept chunks of a rank. One thread at a time writes to a chunk.

    Attributes
    ----------
    make_room : callable
        Called before a slot is written to: returns when the step before is committed on every rank, so that its names
        count, or while nobody has begun to record it. Does nothing until a committer sets it.
    """

    def __init__(self) -> None:
        self.make_room: Callable[[], None] = lambda: None
        self._num_slots: list[int] = []
        self._current: list[int] = []
        self._checksums: list[int] = []
        self._committed: list[int] = []
        self._ahead: dict[int, tuple[int, int]] = {}
        self._lost: dict[int, Exception] = {}

    def __len__(self) -> int:
        return len(self._num_slots)

    def add(self, num_chunks: int, num_slots: int) -> int:
        """Chunks of one more block, with slot 0 as their newest and as the committed one; the first one's index."""
        first = len(self._num_slots)
        self._num_slots += [num_slots] * num_chunks
        for numbers in (self._current, self._checksums, self._committed):
            numbers.extend([0] * num_chunks)
        return first

    def current(self, index: int) -> int:
        """The slot that holds a chunk's newest content; raises what went wrong if that is lost."""
        if index in self._lost:
            raise self._lost[index]
        return self._current[index]

    def checksum(self, index: int) -> int:
        """Of a chunk's newest content."""
        return self._checksums[index]

    def begin_write(self, index: int) -> int:
        """The slot that may be written to now."""
        self.make_room()
        return 1 - self._committed[index] if self._num_slots[index] > 1 else 0

    def wrote(self, index: int, slot: int, checksum: int) -> None:
        """A chunk's newest content is in this slot from now on."""
        self._current[index] = slot
        self._checksums[index] = checksum
        self._lost.pop(index, None)

    def may_write_ahead(self, index: int) -> bool:
        """Whether a chunk has a slot whose content nobody needs, once the step before is committed."""
        if self._num_slots[index] < 2:
            return False
        self.make_room()
        return self._current[index] == self._committed[index] and index not in self._lost

    def wrote_ahead(self, index: int, slot: int, checksum: int) -> None:
        """In this slot is what may become a chunk's newest content."""
        self._ahead[index] = slot, checksum

    def take_ahead(self, index: int) -> None:
        """It becomes the newest."""
        self.wrote(index, *self._ahead.pop(index))

    def drop_ahead(self, index: int) -> None:
        """It does not; harmless if there is none."""
        self._ahead.pop(index, None)

    def lost(self, index: int, error: Exception) -> None:
        """The write of a chunk's newest content failed, so nobody knows what is there."""
        self._lost[index] = error

    def state(self) -> SlotState:
        """A copy of what is newest; raises what went wrong if a chunk's is lost."""
        for error in self._lost.values():
            raise error
        return SlotState(np.array(self._current, np.uint8), np.array(self._checksums, np.uint64))

    def restore(self, state: SlotState) -> None:
        """Let what was newest then, and was not written to since, be newest again."""
        self._lost.clear()
        self._current = state.slots.tolist()
        self._checksums = state.checksums.tolist()

    @property
    def is_committed(self) -> bool:
        """Whether what is newest is what the newest committed step names, so that no write touches it."""
        return self._current == self._committed and not self._lost

    def commit(self, state: SlotState) -> None:
        """Every rank has committed a step that names these slots."""
        self._committed = state.slots.tolist()
