"""One copy, for the ranks of a machine, of the parameters that they hold whole.

[Note: one host copy]
Parameters at home on host, beside a device with memory of its own, in a stage that does not shard them: each rank would
hold the same bytes. They lie in memory that all ranks of a machine map; ranks on other machines have another copy.

First values  Each rank writes a part, and none reads before all have.
Updates       Each rank writes the shards that it updates, and none begins before all are in that step and have read
              what the homes held (`HomeReads.let_shared_change`). A rank reads what it has updated itself; the gather
              on the devices, for which each rank waits for its own update of that flat, tells that all are there:
              from then on any that the machine's ranks have updated is read from home. What others have updated these
              send home together: see [Note: each takes a part home] in arrivals.py. A load is ordered likewise.
Edits         Made in `zo.full_params` by every rank alike, they are written when all have seen that there is one and
              none reads the old values any more: of what is trained each rank's shard, of what is frozen all, by all.

Where they meet, all ranks with a shard do, also one that has its own copy: every meeting is one of all, in one order.

Everything else (saves, exports, states for users) reads on each rank its own shard.

Where the device computes at home, users may write there at any time, so each rank keeps its own. So it does where each
rank updates all shards, as in stage 0: one that did it for all would hold the optimizer's record for all, too, and that
is stage 1.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from zerooffload.accelerator import SharedPages
from zerooffload.sharding.collectives import Collectives

_log = logging.getLogger("zerooffload")


@dataclass(frozen=True)
class Member:
    """A rank that has the copy, in the whole job, and its process."""

    global_rank: int
    pid: int


@dataclass(frozen=True)
class Sharers:
    """The ranks that have one copy.

    Attributes
    ----------
    ranks : tuple[int, ...]
        Those of the shards that they have, in order; none where every rank has its own.
    position : int
        Of this rank among them.
    members : tuple[Member, ...]
    pages : SharedPages or None
        Where the copy lies; still of no length. None where this rank is alone.
    """

    ranks: tuple[int, ...] = ()
    position: int = 0
    members: tuple[Member, ...] = ()
    pages: SharedPages | None = None

    @property
    def num_ranks(self) -> int:
        """That have the copy of this rank."""
        return max(1, len(self.ranks))


def meet_in_memory(collectives: Collectives, *, wanted: bool) -> Sharers:
    """Find the ranks with a shard that can map the same memory as this one. Collective."""
    opened: dict[int, SharedPages] = {}
    reason = ""
    try:
        if wanted:
            opened[collectives.rank] = SharedPages.make()
    except OSError as error:
        reason = str(error)
    own = opened[collectives.rank].address if opened else None
    everyones = collectives.gather_of_shards((own, Member(collectives.global_rank, os.getpid())))
    for rank, (address, _) in enumerate(everyones):
        if wanted and address is not None and rank != collectives.rank:
            try:
                opened[rank] = SharedPages.open(address)
            except OSError as error:
                reason = reason or f"rank {collectives.rank} cannot map what rank {rank} has: {error}"
    found = collectives.gather_of_shards((list(opened), reason))
    groups = together([reached for reached, _ in found])
    if collectives.rank == 0 and wanted and len(groups) > 1:
        _tell(groups, next((why for _, why in found if why), "not all ranks have such parameters"))
    mine = next(group for group in groups if collectives.rank in group)
    pages = opened.pop(mine[0], None) if len(mine) > 1 else None
    # All ranks have opened what they need.
    for others in opened.values():
        others.close()
    if len(groups) == len(found):
        return Sharers()
    return Sharers(mine, mine.index(collectives.rank), tuple(everyones[rank][1] for rank in mine), pages)


def together(reached: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Ranks in groups whose first has memory that the others can map, given whose memory each rank can."""
    groups: list[tuple[int, ...]] = []
    left = list(range(len(reached)))
    while left:
        first = left[0]
        groups.append((first, *(rank for rank in left[1:] if first in reached[rank])))
        left = [rank for rank in left if rank not in groups[-1]]
    return groups


def _tell(groups: Sequence[Sequence[int]], reason: str) -> None:
    if all(len(group) == 1 for group in groups):
        _log.info("each rank keeps its own copy of parameters on host: %s", reason)
        return
    named = "; ".join(", ".join(map(str, group)) for group in groups)
    _log.info("ranks that have one copy of parameters on host: %s (%s)", named, reason)
