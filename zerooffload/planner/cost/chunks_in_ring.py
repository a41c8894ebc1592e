"""What an update leaves in the staging ring: see [Note: the ring is the host's cache] in tiers/staging.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerooffload.planner.cost.demand import UnitDemand
from zerooffload.planner.placement import NUM_STAGING_SLOTS


class ChunksInRing:
    """Of each staged unit, the part in chunks that are still in host memory after the last update.

    Parameters
    ----------
    num_cached : int
        Slots beside those that work needs.
    num_staged : int
        Chunks that pass through the ring in an update.
    goes_round : bool
        Whether updates are hidden, all in one order; else they go there and back.
    goes_ahead : bool
        Whether updates follow backward.

    Attributes
    ----------
    held : Mapping[str, float]
        That a visit finds there.
    kept : Mapping[str, float]
        That the next update finds there.
    """

    def __init__(
        self,
        demands: Mapping[str, UnitDemand],
        num_cached: int,
        num_staged: int,
        *,
        goes_round: bool,
        goes_ahead: bool,
    ) -> None:
        self.held: Mapping[str, float] = {}
        self.kept: Mapping[str, float] = {}
        self._demands = demands
        self._num_cached, self._num_staged = num_cached, num_staged
        self._goes_round, self._goes_ahead = goes_round, goes_ahead

    def part_for_visit(self, name: str, *, is_first: bool, is_beside_update: bool) -> float:
        """Of a unit's chunks, as its visit finds them, the first one of the step or another.

        Parameters
        ----------
        is_beside_update : bool
            Whether others' updates are under way, so that what does not stay for the next update has gone.
        """
        if is_beside_update:
            return self.part_for_update(name)
        held = self.held.get(name, 0.0)
        if is_first and self._goes_round and not self._goes_ahead and name in self.held:
            # Its update was a moment ago: the last chunk's slot has not been taken for another unit's yet.
            return max(held, 1 / len(self._demands[name].chunk_numels))
        return held

    def part_for_update(self, name: str) -> float:
        """Of a unit's chunks, as its update finds them."""
        return self.kept.get(name, 0.0)

    def leave(self, order: Sequence[str], *, is_backwards: bool) -> None:
        """An update went through the units in this order, each unit's chunks from its last one with `is_backwards`."""
        num_slots = self._num_cached + NUM_STAGING_SLOTS
        if not self._goes_round or self._num_staged <= num_slots:
            self.held = self.kept = self._first_chunks(order[::-1], num_slots, from_end=not is_backwards)
            return
        # Some stay for the next update; through the other slots all others pass.
        self.kept = self._first_chunks(order, self._num_cached)
        if self._goes_ahead:
            # It follows backward, so that what comes first in forward is updated last, and each unit's last chunk.
            self.held = self._first_chunks(order, num_slots, from_end=True)
            return
        last = self._first_chunks(order[::-1], NUM_STAGING_SLOTS, from_end=True)
        self.held = {name: max(self.kept[name], last[name]) for name in last}

    def _first_chunks(self, order: Sequence[str], num_chunks: int, *, from_end: bool = False) -> dict[str, float]:
        """Of each staged unit, the part in chunks that are among the first so many; of a unit the last ones first."""
        parts, left = {}, num_chunks
        for name in order:
            unit = self._demands[name]
            numels = unit.chunk_numels[::-1] if from_end else unit.chunk_numels
            if numels and unit.staged_nbytes:
                parts[name] = sum(numels[:left]) / sum(numels)
                left = max(0, left - len(numels))
        return parts
