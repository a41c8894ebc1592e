from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zerooffload.formats import MIB
from zerooffload.telemetry import process_resident_bytes
from zerooffload.train.process import resident_bytes_trimmed, warm_up

IN_A_FRESH_PROCESS = """
import torch
from zerooffload.telemetry import process_resident_bytes
from zerooffload.train.process import give_freed_memory_back
can = give_freed_memory_back()
tensors = [torch.ones(1 << 18) for _ in range(64)]
before = process_resident_bytes()
del tensors[::2]
print(int(can), before - process_resident_bytes())
"""


def test_freed_tensors_leave_the_process_though_others_live_between_them() -> None:
    # Of its own: memory that a process has freed before is used first, and kept.
    output = subprocess.check_output([sys.executable, "-P", "-W", "ignore", "-c", IN_A_FRESH_PROCESS], text=True)
    can, freed_bytes = map(int, output.split())
    if not can:
        pytest.skip("this C library cannot be told to")
    assert freed_bytes > 30 * MIB


def test_the_trimmed_size_is_no_larger() -> None:
    assert resident_bytes_trimmed() <= process_resident_bytes() + MIB


def test_warming_up_leaves_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    warm_up()
    assert torch.equal(torch.rand(1), expected)
