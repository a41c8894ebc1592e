"""What reads states at home while they may change there: copies of parameters to the device, and saves.

[Note: a home changes when its copies have run]
The host does not wait for a copy to the device: compute is put behind it. Where gradients of what was computed have
come down, the copy has run; but nobody may ever wait for an evaluation. So whoever changes a chunk of a home in host
memory waits for the last copy of it. A staging slot waits for its copies by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerooffload.accelerator import Event
from zerooffload.runtime.snapshots import Snapshots
from zerooffload.sharding.collectives import Collectives
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Wait, Waits, wait_for_all
from zerooffload.tiers import Block


class HomeReads:
    """The last copy of each chunk of each home. Begun by the thread that trains, waited for by any."""

    def __init__(self, waits: Waits, collectives: Collectives, snapshots: Snapshots) -> None:
        self._waits = waits
        self._collectives = collectives
        self._snapshots = snapshots
        self._last: dict[tuple[int, int], Event] = {}

    def begun(self, block: Block, chunk: int, copied: Event) -> None:
        """A chunk of a home is read until `copied`; the queue keeps its order, so earlier copies have run then."""
        self._last[id(block), chunk] = copied

    def before_change(self, block: Block, chunk: int) -> None:
        """Return when nothing reads a chunk of a block."""
        self._snapshots.before_change(block, chunk)
        copied = self._last.get((id(block), chunk))
        if copied is not None:
            self._waits.until(Wait.PARAMETER_REUSE, copied)

    def finish(self) -> None:
        """Return when no copy to the device reads any."""
        wait_for_all(self._waits, Wait.PARAMETER_REUSE, self._last.values())
        self._last.clear()

    def let_shared_change(self, parts: Iterable[UnitFlat]) -> None:
        """Return when no rank reads those of these flats' homes that ranks share. Collective if there is one."""
        if any(part.home_is_shared for part in parts):
            self.finish()
            self._collectives.gather_of_shards(None)
