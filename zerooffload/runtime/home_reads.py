"""Copies to the device that read parameters at home, where the host may change them.

[Note: a home changes when its copies have run]
The host does not wait for a copy to the device: compute is put behind it. Where gradients of what was computed have
come down, the copy has run; but nobody may ever wait for an evaluation. So whoever changes a chunk of a home in host
memory waits for the last copy of it. A staging slot waits for its copies by itself.
"""

from __future__ import annotations

from zerooffload.accelerator import Event
from zerooffload.telemetry import Wait, Waits, wait_for_all
from zerooffload.tiers import Block


class HomeReads:
    """The last copy of each chunk of each home. Begun by the thread that trains, waited for by any."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._last: dict[tuple[int, int], Event] = {}

    def begun(self, block: Block, chunk: int, copied: Event) -> None:
        """A chunk of a home is read until `copied`; the queue keeps its order, so earlier copies have run then."""
        self._last[id(block), chunk] = copied

    def before_change(self, block: Block, chunk: int) -> None:
        """Return when nothing reads a chunk of a block."""
        copied = self._last.get((id(block), chunk))
        if copied is not None:
            self._waits.until(Wait.PARAMETER_REUSE, copied)

    def finish(self) -> None:
        """Return when nothing reads any."""
        wait_for_all(self._waits, Wait.PARAMETER_REUSE, self._last.values())
        self._last.clear()
