"""The learning rate over the steps."""

from __future__ import annotations

import math

from zerooffload.train.recipe import ScheduleSection


def lr_factor(schedule: ScheduleSection, step: int, num_steps: int) -> float:
    """What `lr` is multiplied with in step `step` (0 for the first) of `num_steps`."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    span = max(1, num_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    match schedule.kind:
        case "constant":
            return 1.0
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * left
