"""What a run moved, where it waited, what took place when, and what memory it took."""

from zerooffload.telemetry.last_step import LaneUse, LastStep, StepPicture
from zerooffload.telemetry.process_memory import process_peak_bytes, process_resident_bytes
from zerooffload.telemetry.recorder import Link, Recorder, Work
from zerooffload.telemetry.report import StepReport, TierUsage
from zerooffload.telemetry.spans import Lane, Span
from zerooffload.telemetry.timeline import Batch, Level, Listener, Step, Timeline
from zerooffload.telemetry.trace_file import TraceFile
from zerooffload.telemetry.waits import Wait, Waitable, Waits, wait_for_all, wait_in_turn

__all__ = [
    "Batch",
    "Lane",
    "LaneUse",
    "LastStep",
    "Level",
    "Link",
    "Listener",
    "Recorder",
    "Span",
    "Step",
    "StepPicture",
    "StepReport",
    "TierUsage",
    "Timeline",
    "TraceFile",
    "Wait",
    "Waitable",
    "Waits",
    "Work",
    "process_peak_bytes",
    "process_resident_bytes",
    "wait_for_all",
    "wait_in_turn",
]
