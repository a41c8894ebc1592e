"""One copy, for all ranks of a machine, of the parameters that they hold whole.

[Note: one host copy]
Parameters at home on host, beside a device with memory of its own, in a stage that does not shard them: each rank would
hold the same bytes. They lie in memory that all ranks map.

First values  Each rank writes its shard's, and none reads before all have.
Updates       Each rank writes the shards that it updates, and none begins before all are in that step and have read
              what the homes held (`HomeReads.let_shared_change`). A rank reads what it has updated itself; the gather
              on the devices, for which each rank waits for its own update of that flat, tells that all are there:
              from then on any of them is read from home. A load is ordered likewise.
Edits         Made in `zo.full_params` by every rank alike, they are written when all have seen that there is one and
              none reads the old values any more: of what is trained each rank's shard, of what is frozen all, by all.

Everything else (saves, exports, states for users) reads on each rank its own shard.

Where the device computes at home, users may write there at any time, so each rank keeps its own. So it does where each
rank updates all shards, as in stage 0: one that did it for all would hold the optimizer's record for all, too, and that
is stage 1.
"""

from __future__ import annotations

import logging

from zerooffload.accelerator import SharedPages
from zerooffload.sharding.collectives import Collectives

_log = logging.getLogger("zerooffload")


def meet_in_memory(collectives: Collectives, *, wanted: bool) -> SharedPages | None:
    """Memory that all ranks with a shard can map, still of no length. Collective.

    None, on all of them, if one cannot, or rank 0 does not want it.
    """
    pages: SharedPages | None = None
    reason = ""
    try:
        pages = SharedPages.make() if wanted and collectives.rank == 0 else None
    except OSError as error:
        reason = str(error)
    address = collectives.gather_of_shards(pages.address if pages is not None else None)[0]
    if pages is None and address is not None:
        try:
            pages = SharedPages.open(address)
        except OSError as error:
            reason = str(error)
    reasons = [reason for reason in collectives.gather_of_shards(reason) if reason]
    if not reasons:
        return pages
    if pages is not None:
        pages.close()
    if collectives.rank == 0:
        _log.info("each rank keeps its own copy of parameters on host: %s", reasons[0])
    return None
