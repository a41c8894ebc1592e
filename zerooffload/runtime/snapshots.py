"""States as they are at one moment, while training goes on.

[Note: a save beside the training]
What a save has not read yet must not change. So whoever is about to change a chunk of a home waits until it was read
(and written, where it is written from there), and the save reads that chunk next. What a hidden update of the saved
step still writes is waited for the other way round: the save reads a flat's chunks when its update is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from zerooffload.errors import ZeroOffloadError
from zerooffload.runtime.logical_states import StateChunk
from zerooffload.runtime.worker_thread import Outcome
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Wait, Waitable, Waits
from zerooffload.tiers import Block


class Snapshot:
    """Chunks that are to be read as they are now.

    Parameters
    ----------
    chunks : Iterable[StateChunk]
    updates : Mapping[UnitFlat, Waitable]
        Hidden updates of the step that is saved.
    """

    def __init__(self, chunks: Iterable[StateChunk], updates: Mapping[UnitFlat, Waitable]) -> None:
        self._updates = updates
        self._lock = threading.Lock()
        self._left = dict.fromkeys(chunks)
        self._wanted: deque[StateChunk] = deque()
        self._readings = {chunk: _Reading() for chunk in self._left}
        self._of_block = {(id(block), chunk.number): chunk for chunk in self._left for block in chunk.blocks}

    def next(self) -> StateChunk | None:
        """The chunk that is to be read next, the step's update of it done; None if there is none left.

        Raises
        ------
        Exception
            If its update failed.
        """
        with self._lock:
            chunk = self._choose()
        if chunk is None:
            return None
        update = self._updates.get(chunk.part)
        if update is not None:
            update.wait()
        return chunk

    def was_read(self, chunk: StateChunk, leaving: Sequence[Waitable] = ()) -> None:
        """It may change, once `leaving` is over; what fails of that is told elsewhere."""
        self._readings[chunk].leave(leaving)

    def abandon(self) -> None:
        """Nothing more is read."""
        with self._lock:
            self._left.clear()
        for reading in self._readings.values():
            reading.over()

    def reading_of(self, block: Block, number: int) -> Waitable | None:
        """What must be over before a chunk of a block is changed; None if nothing must. It is read next."""
        chunk = self._of_block.get((id(block), number))
        if chunk is None or self._readings[chunk].done():
            return None
        update = self._updates.get(chunk.part)
        if update is not None and not update.done():
            # It is that update which asks: it makes what is saved.
            return None
        with self._lock:
            if chunk in self._left:
                self._wanted.append(chunk)
        return self._readings[chunk]

    def _choose(self) -> StateChunk | None:
        while self._wanted:
            chunk: StateChunk | None = self._wanted.popleft()
            if chunk in self._left:
                break
        else:
            chunk = next(iter(self._left), None)
        if chunk is not None:
            del self._left[chunk]
        return chunk


class _Reading(Outcome):
    """That a chunk was read, and what was read from where it lies has been written; never fails."""

    def __init__(self) -> None:
        super().__init__()
        self._leaving: Sequence[Waitable] = ()

    def leave(self, leaving: Sequence[Waitable]) -> None:
        """It was read, but for these."""
        self._leaving = leaving
        self.over()

    def wait(self) -> None:
        """Block."""
        super().wait()
        for item in self._leaving:
            with suppress(ZeroOffloadError):
                item.wait()

    def done(self) -> bool:
        """Whether it has."""
        return super().done() and all(item.done() for item in self._leaving)


class Snapshots:
    """The snapshot that is being read, if there is one, for whoever changes homes."""

    def __init__(self, waits: Waits) -> None:
        self.current: Snapshot | None = None
        self._waits = waits

    def before_change(self, block: Block, number: int) -> None:
        """Return when a chunk of a block may be changed. For any thread but the one that saves."""
        snapshot = self.current
        reading = None if snapshot is None else snapshot.reading_of(block, number)
        if reading is not None:
            self._waits.until(Wait.SNAPSHOT, reading)

    def before_edit(self, parts: Iterable[UnitFlat]) -> None:
        """Return when whoever sees the homes of these flats may write to them."""
        for part in parts if self.current is not None else ():
            for number in part.own_chunks:
                self.before_change(part.home, number)
