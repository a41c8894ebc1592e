"""A GPU's figures: that each is measured, and that none is absurd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerooffload.calibration import Effort, calibrate
from zerooffload.formats import MIB

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = calibrate(effort=Effort(rounds=3, turn_seconds=0.05, pin_seconds=0.2, array_bytes=64 * MIB)).device
    assert (device.name, device.count) == (torch.cuda.get_device_name(0), torch.cuda.device_count())
    assert device.memory == torch.cuda.get_device_properties(0).total_memory
    assert not device.shares_host_memory
    assert min(device.matmul_flops[dtype] for dtype in ("fp32", "bf16", "fp16")) > 1e10
    assert device.copy_in is not None
    assert device.copy_out is not None
    assert device.copy_both is not None
    assert device.copy_both <= 1.2 * (device.copy_in + device.copy_out)
    # What crosses a link to the host is slower than the device's own memory.
    assert device.copy_in < device.memory_bandwidth
    assert device.operation_seconds < 1e-3
