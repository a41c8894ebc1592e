"""What a run moved, where it waited, and what memory it took."""

from zerooffload.telemetry.process_memory import process_peak_bytes, process_resident_bytes
from zerooffload.telemetry.recorder import Link, Recorder, Work
from zerooffload.telemetry.report import StepReport, TierUsage
from zerooffload.telemetry.waits import Wait, Waitable, Waits, wait_for_all

__all__ = [
    "Link",
    "Recorder",
    "StepReport",
    "TierUsage",
    "Wait",
    "Waitable",
    "Waits",
    "Work",
    "process_peak_bytes",
    "process_resident_bytes",
    "wait_for_all",
]
