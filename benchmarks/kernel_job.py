"""The whole job that `adam_kernel.py` times: from a bf16 gradient to a bf16 parameter, with the norm in between."""

from __future__ import annotations

import math

import torch
from kernel_arrays import BF16, CHECKED_NUMEL, FP32, Configuration, Memory, OurStep, require_equal
from kernel_peers import torch_random

from zerooffload.optim.kernels import NativeKernels, TorchKernels
from zerooffload.runtime.clipping import clip_factor

MAX_NORM = 1.0
ACCUMULATE_SEPARATE = "torch: add_, isfinite, norm"
ACCUMULATE_FEWEST = "torch: add_, norm"
JOB_SEPARATE = "torch: add_, isfinite, norm, mul_, fused AdamW, copy_"
JOB_FEWEST = "torch: add_, norm, fused AdamW that clips, copy_"


class OurJob:
    """Add a bf16 gradient to an fp32 sum, clip by the norm, and step the fp32 master of a bf16 parameter."""

    def __init__(self, memory: Memory, kernels: NativeKernels) -> None:
        self.source = memory.random(BF16)
        self.update = OurStep(Configuration("adamw", BF16, FP32), memory, kernels)
        self.total = self.update.grad

    def accumulate(self) -> float:
        """The first sweep: the new sum's norm; not finite if an element is not."""
        sums = self.update.kernels.add(self.total, self.source)
        return math.sqrt(math.fsum(sums.tolist()))

    def __call__(self) -> None:
        """Both sweeps."""
        norm = self.accumulate()
        if not math.isfinite(norm):
            raise RuntimeError("the gradients are not finite")
        self.update.step(self.update.scalars(3, clip_factor(norm, MAX_NORM)))

    def verify(self) -> None:
        """Compare both sweeps with the reference; RuntimeError if a bit differs."""
        expected = self.total[:CHECKED_NUMEL].clone()
        expected_sums = TorchKernels().add(expected, self.source[:CHECKED_NUMEL])
        sums = self.update.kernels.add(self.total, self.source)
        require_equal("accumulated gradients", self.total[:CHECKED_NUMEL], expected)
        require_equal("their square sums", sums[: expected_sums.numel()], expected_sums)
        self.update.verify()


class TorchJob:
    """The same job in torch's operations, with an fp32 master and a bf16 copy."""

    def __init__(self, memory: Memory) -> None:
        self.source, self.total = torch_random(memory, BF16), torch_random(memory, FP32)
        self.param = torch.nn.Parameter(torch_random(memory, FP32))
        self.param.grad = self.total
        self.copy = self.param.detach().to(BF16)
        self.optimizer = torch.optim.AdamW([self.param], lr=1e-3, fused=True)

    def accumulate_separately(self) -> float:
        """The norm, in a pass for each operation."""
        self.total.add_(self.source)
        if not torch.isfinite(self.total).all():
            raise RuntimeError("the gradients are not finite")
        return float(torch.linalg.vector_norm(self.total))

    def accumulate(self) -> float:
        """The norm, which is finite only if all elements are."""
        self.total.add_(self.source)
        return float(torch.linalg.vector_norm(self.total))

    def separately(self) -> None:
        """The whole, in a pass for each operation."""
        self.total.mul_(clip_factor(self.accumulate_separately(), MAX_NORM))
        self.optimizer.step()
        self.copy.copy_(self.param.detach())

    def with_fewest_passes(self) -> None:
        """The whole; the step itself clips, through what torch has there for gradient scalers."""
        norm = self.accumulate()
        if not math.isfinite(norm):
            raise RuntimeError("the gradients are not finite")
        self.optimizer.grad_scale = torch.tensor(1.0 / clip_factor(norm, MAX_NORM))  # type: ignore[attr-defined]
        self.optimizer.step()
        del self.optimizer.grad_scale  # type: ignore[attr-defined]
        self.copy.copy_(self.param.detach())
