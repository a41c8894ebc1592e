"""What checkpoints take of the host's budget while they are saved or loaded."""

from __future__ import annotations

from zerooffload.checkpoint.page_writer import NUM_BLOCKS, block_nbytes
from zerooffload.planner.placement import FlatPlacement, Placement, StatePlacement
from zerooffload.runtime.logical_states import NUM_SLOTS


def checkpoint_nbytes(placement: Placement) -> int:
    """The most that a save leases, or the load of a checkpoint that was saved by such a run."""
    flats = [flat for unit, _ in placement.kinds for flat in unit.flats]
    longest: dict[str, int] = {}
    for state in (state for flat in flats for state in _saved(flat)):
        numel = min(state.layout.chunk_numel, state.layout.shard_numel)
        for part in state.layout.parts:
            nbytes = part.num_items(numel) * part.dtype.itemsize
            longest[part.name] = max(longest.get(part.name, 0), nbytes)
    saved_nbytes = NUM_BLOCKS * block_nbytes(max(longest.values(), default=0))
    staged_nbytes = max((_staged_nbytes(flat, placement) for flat in flats), default=0)
    return NUM_SLOTS * staged_nbytes + max(saved_nbytes, sum(longest.values()))


def _saved(flat: FlatPlacement) -> list[StatePlacement]:
    return [flat.param] if flat.optimizer is None else [flat.param, flat.optimizer]


def _staged_nbytes(flat: FlatPlacement, placement: Placement) -> int:
    """Of a chunk's records that the host cannot address, and of those that also go to files."""
    by_host = placement.reach.by_host
    return sum(
        state.layout.largest_file_nbytes * ((not by_host(state.tier)) + state.is_mirrored) for state in _saved(flat)
    )
