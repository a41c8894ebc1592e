"""The process that trains: made ready before its memory is measured, so that what follows is the run's own."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

import torch

from zerooffload.planner.tracing import LARGE_RESULT_NBYTES
from zerooffload.telemetry import process_resident_bytes

_M_MMAP_THRESHOLD = -3  # malloc.h


def give_freed_memory_back() -> bool:
    """Let the C library return freed tensors to the system at once; whether it can (glibc).

    Left alone, glibc raises its threshold for separate mappings up to 32 MiB as blocks are freed, and keeps freed
    activations between those that live: the process then holds half as much again as its tensors take, and what a step
    needs cannot be told in advance. It costs page faults when the memory is taken again: plans count them, see
    [Note: large results are new memory] in planner/tracing.py.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_RESULT_NBYTES))


def warm_up() -> None:
    """Make torch start its threads and load its kernels, so that this counts in the baseline."""
    queries = torch.ones(1, 2, 64, 32, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries, is_causal=True)
    weight = torch.ones(64, 64, requires_grad=True)
    logits = attended.flatten().view(-1, 64) @ weight
    torch.nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()


def resident_bytes_trimmed() -> int:
    """Resident memory of the process after it gave back what it does not use, so that later use shows as growth."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return process_resident_bytes()
