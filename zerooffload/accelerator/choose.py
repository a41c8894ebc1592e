"""Which device computes."""

from __future__ import annotations

import torch

from zerooffload.accelerator.api import Accelerator
from zerooffload.accelerator.cpu import CpuAccelerator


def default_accelerator() -> Accelerator:
    """The current CUDA device where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return CpuAccelerator()
    from zerooffload.accelerator.cuda import CudaAccelerator  # noqa: PLC0415 - only where there is CUDA

    return CudaAccelerator(torch.device("cuda", torch.cuda.current_device()))
