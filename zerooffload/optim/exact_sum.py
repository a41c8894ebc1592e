"""Sums that do not depend on the order of what is added."""

from __future__ import annotations

import math

import torch

from zerooffload import native


def exact_sum(values: torch.Tensor) -> float:
    """Add numbers exactly and round once, to nearest even; infinite where the largest float64 is too small.

    Parameters
    ----------
    values : torch.Tensor
        float64 [n], contiguous, on the CPU, none below 0.

    Raises
    ------
    ValueError
        For a number below 0.
    """
    if native.available:
        return native.module.exact_sum(values.data_ptr(), values.numel())
    numbers = values.tolist()
    if min(numbers, default=0.0) < 0:
        raise ValueError("values: expected none below 0")
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf
