from __future__ import annotations

import pytest
import torch

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.memory import Budget
from zerooffload.telemetry import Waits
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import Part, RecordLayout, Transfers


@pytest.fixture
def recorder() -> CountingRecorder:
    return CountingRecorder()


@pytest.fixture
def waits(recorder: CountingRecorder) -> Waits:
    return Waits(recorder)


@pytest.fixture
def accelerator() -> CpuAccelerator:
    return CpuAccelerator()


@pytest.fixture
def transfers(accelerator: CpuAccelerator, waits: Waits, recorder: CountingRecorder) -> Transfers:
    return Transfers(accelerator, waits, recorder)


@pytest.fixture
def budget() -> Budget:
    return Budget("tier", 1 << 20)


@pytest.fixture
def layout() -> RecordLayout:
    """Two full chunks and a short one, of two parts."""
    return RecordLayout((Part("exp_avg", torch.float32), Part("exp_avg_sq", torch.float32)), 10_000, 4096)
