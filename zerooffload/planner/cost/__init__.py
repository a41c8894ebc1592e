"""What a step of a plan takes on a machine: bytes, seconds, memory. Pure; docs/planning.md has the formulas."""

from zerooffload.planner.cost.estimate import Estimate, estimate
from zerooffload.planner.cost.memory import MemoryAccount
from zerooffload.planner.cost.speeds import Speeds, speeds_of
from zerooffload.planner.cost.step import Span, StepKind
from zerooffload.planner.cost.task_list import Lane

__all__ = [
    "Estimate",
    "Lane",
    "MemoryAccount",
    "Span",
    "Speeds",
    "StepKind",
    "estimate",
    "speeds_of",
]
