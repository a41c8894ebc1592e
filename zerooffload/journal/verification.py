"""Comparing everything that a run left on its paths with its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerooffload.accelerator import populated_pages
from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.files import open_file
from zerooffload.errors import CheckpointError, TierIOError
from zerooffload.journal.history import History, read_history
from zerooffload.journal.manifest import StateEntry
from zerooffload.tiers import Part, RecordLayout, SlotState
from zerooffload.tiers.checksums import checksum
from zerooffload.tiers.nvme import STATES_FILE


@dataclass(frozen=True)
class Verified:
    """What a rank's directories hold.

    Attributes
    ----------
    step : int or None
        The newest step that can be read; None if no run is there.
    num_chunks, nbytes : int
        Compared.
    problems : tuple[str, ...]
        What is damaged or missing, with its file.
    """

    step: int | None
    num_chunks: int
    nbytes: int
    problems: tuple[str, ...]


def verify(directories: Sequence[Path], engine: Engine) -> Verified:
    """Read every chunk that the newest record names; `directories` are all those of a rank. Nothing is changed."""
    try:
        history = read_history(directories)
    except CheckpointError as error:
        return Verified(None, 0, 0, (str(error),))
    if history.manifest is None:
        return Verified(None, 0, 0, ())
    newest = history.records[max(history.records)]
    problems, nbytes = list(history.problems), 0
    try:
        files = [open_file(directories[history.order.index(path)] / STATES_FILE) for path in range(len(directories))]
    except TierIOError as error:
        return Verified(newest.step, 0, 0, (*problems, str(error)))
    try:
        for chunk in _chunks(history, files):
            problem = chunk.problem(engine, newest.chunks)
            problems += [problem] if problem else []
            nbytes += chunk.nbytes
    finally:
        for file in files:
            file.close()
    return Verified(newest.step, len(newest.chunks.slots), nbytes, tuple(problems))


@dataclass(frozen=True)
class _Chunk:
    """A chunk's place: index in the record, state, number in the state."""

    index: int
    state: str
    number: int
    file: OpenFile
    offsets: tuple[int, ...]
    nbytes: int

    def problem(self, engine: Engine, named: SlotState) -> str:
        """What is wrong with it, or ""."""
        slot = int(named.slots[self.index])
        if slot >= len(self.offsets):
            return f"the record names slot {slot} of chunk {self.number} of {self.state}, which has no such slot"
        memory: torch.Tensor = populated_pages(self.nbytes)
        try:
            engine.submit_read(self.file, self.offsets[slot], memory).wait()
        except TierIOError as error:
            return str(error)
        if checksum(memory) == int(named.checksums[self.index]):
            return ""
        where = f"{self.file.path} at offset {self.offsets[slot]}, {self.nbytes} bytes"
        return f"{where}: chunk {self.number} of {self.state} is not what was written"


def _chunks(history: History, files: Sequence[OpenFile]) -> Iterator[_Chunk]:
    index = 0
    for state in history.manifest.states if history.manifest is not None else ():
        layout = layout_of(state)
        for number, (path, offsets) in enumerate(state.chunks):
            yield _Chunk(index, state.name, number, files[path], tuple(offsets), layout.file_nbytes(number))
            index += 1


def layout_of(state: StateEntry) -> RecordLayout:
    """How a kept state is cut into records."""
    parts = tuple(Part(part.name, getattr(torch, part.dtype), part.block_numel) for part in state.parts)
    return RecordLayout(parts, state.numel, state.chunk_numel, range(state.num_shards))
