"""One copy, for all ranks of a machine, of what they hold whole and never write.

[Note: one host copy]
Frozen parameters at home on host, beside a device with memory of its own, in a stage that does not shard them: each
rank would hold the same bytes. They lie in memory that all ranks map. Each rank writes its shard's first values, and
none reads before all have. An edit in `zo.full_params` is written by every rank alike, when all have seen that there is
one and none reads the old values any more. Where the device computes at home, users may write there at any time, so
each rank keeps its own.
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
        _log.info("each rank keeps its own copy of frozen parameters on host: %s", reasons[0])
    return None
