"""The arithmetic of the update, native where it can be, in torch operations elsewhere; the same bits either way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from zerooffload import native
from zerooffload.machine import usable_cores
from zerooffload.optim import reference
from zerooffload.optim.record import EXP_AVG, EXP_AVG_SQ, REMAINDER
from zerooffload.optim.scalars import AdamWScalars


class Kernels(Protocol):
    """Operations on 1D contiguous tensors of one device."""

    name: str

    def adamw(
        self,
        param: torch.Tensor,
        record: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update `param` and its record (see `optimizer_parts`) in place."""

    def square_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """As `reference.square_sums`, on the CPU."""

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target += source`, rounded once to their dtype."""


class TorchKernels:
    """The reference itself: on any device, and where the native module is missing."""

    name = "torch"

    def adamw(
        self,
        param: torch.Tensor,
        record: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """See `Kernels`."""
        exp_avg, exp_avg_sq = record[EXP_AVG.name], record[EXP_AVG_SQ.name]
        if REMAINDER.name in record:
            reference.adamw_step_bf16(param, record[REMAINDER.name], exp_avg, exp_avg_sq, grad, scalars)
        else:
            reference.adamw_step(param, exp_avg, exp_avg_sq, grad, scalars)

    def square_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        return reference.square_sums(grad).cpu()

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Kernels`."""
        target.add_(source)


class NativeKernels:
    """The vectorized C++ kernels, for host memory.

    Parameters
    ----------
    num_threads : int
        Threads of the kernels' own pool, the calling one included. Results do not depend on it.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = native.module.ThreadPool(num_threads)
        self._dtypes = {
            torch.float32: native.module.Dtype.float32,
            torch.bfloat16: native.module.Dtype.bfloat16,
        }
        self.name = f"native ({native.module.active_target()}, {num_threads} threads)"

    def adamw(
        self,
        param: torch.Tensor,
        record: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """See `Kernels`."""
        factors = native.module.AdamWScalars(**vars(scalars))
        moments = (record[EXP_AVG.name].data_ptr(), record[EXP_AVG_SQ.name].data_ptr())
        gradient = (grad.data_ptr(), self._dtypes[grad.dtype])
        if REMAINDER.name in record:
            master = (param.data_ptr(), record[REMAINDER.name].data_ptr())
            native.module.adamw_bf16(self._pool, *master, *moments, *gradient, param.numel(), factors)
        else:
            native.module.adamw_fp32(self._pool, param.data_ptr(), *moments, *gradient, param.numel(), factors)

    def square_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        out = torch.empty(-(-grad.numel() // reference.BLOCK_NUMEL), dtype=torch.float64)
        dtype = self._dtypes[grad.dtype]
        native.module.square_sums(self._pool, grad.data_ptr(), dtype, grad.numel(), out.data_ptr())
        return out

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Kernels`."""
        dtype = self._dtypes[target.dtype]
        native.module.accumulate(self._pool, target.data_ptr(), source.data_ptr(), dtype, target.numel())


def host_kernels(num_threads: int | None = None) -> Kernels:
    """Kernels for host memory: native ones where the module is there, else torch's."""
    if native.available:
        return NativeKernels(num_threads or usable_cores())
    return TorchKernels()
