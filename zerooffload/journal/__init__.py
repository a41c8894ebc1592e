"""The journal of a run on the nvme tier: what was committed, where it lies, and how it is found again.

The format on the drive is specified in `zerooffload/docs/nvme_format.md`.
"""

from zerooffload.journal.history import History, common_step, read_history
from zerooffload.journal.manifest import FlatEntry, Manifest, ParamEntry, PartEntry, StateEntry
from zerooffload.journal.record import StepRecord
from zerooffload.journal.writer import Journal, forget_run, record_capacity

__all__ = [
    "FlatEntry",
    "History",
    "Journal",
    "Manifest",
    "ParamEntry",
    "PartEntry",
    "StateEntry",
    "StepRecord",
    "common_step",
    "forget_run",
    "read_history",
    "record_capacity",
]
