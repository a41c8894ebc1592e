"""The arithmetic of the update, native where it can be, in torch operations elsewhere; the same bits either way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from zerooffload import native
from zerooffload.machine import this_ranks_cores
from zerooffload.optim import reference
from zerooffload.optim.record import MASTER, REMAINDER, exponents_name
from zerooffload.optim.rules import StepScalars

if TYPE_CHECKING:
    from zerooffload._native import Arrival


@dataclass(frozen=True)
class Old:
    """The values before a step that writes the new ones elsewhere.

    Attributes
    ----------
    param : torch.Tensor
        The one to be updated itself where only the record is elsewhere.
    record : Mapping[str, torch.Tensor]
        In the layout of the record to be updated; that itself where only `param` is elsewhere.
    """

    param: torch.Tensor
    record: Mapping[str, torch.Tensor]


class Kernels(Protocol):
    """Operations on 1D contiguous tensors of one device."""

    name: str

    def step(
        self,
        scalars: StepScalars,
        param: torch.Tensor,
        record: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        first_index: int,
        *,
        old: Old | None = None,
    ) -> None:
        """Update `param` and its record, in place, or from their old values beside them; see `reference.step`."""

    def square_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """As `reference.square_sums`, on the CPU."""

    def add(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """`target += source`, rounded once to the target's dtype; return the target's square sums."""

    def replace(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """`target = source`, rounded once to the target's dtype; return the target's square sums."""


class TorchKernels:
    """The reference itself: on any device, and where the native module is missing."""

    name = "torch"

    def step(
        self,
        scalars: StepScalars,
        param: torch.Tensor,
        record: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        first_index: int,
        *,
        old: Old | None = None,
    ) -> None:
        """See `Kernels`."""
        if old is not None:
            param.copy_(old.param)
            for name, part in record.items():
                part.copy_(old.record[name])
        reference.step(scalars, param, record, grad, first_index)

    def square_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        return reference.square_sums(grad).cpu()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        target.add_(source)
        return self.square_sums(target)

    def replace(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        target.copy_(source)
        return self.square_sums(target)


class NativeKernels:
    """The vectorized C++ kernels, for host memory.

    Parameters
    ----------
    num_threads : int
        Threads of the kernels' own pool, the calling one included. Results do not depend on it. They sleep between
        calls.
    cores : sequence of int
        Where they may run; all cores if empty.

    Raises
    ------
    ConfigError
        If the environment forces a CPU target that is not there.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] = ()) -> None:
        module = native.module
        self.name = f"native ({native.active_target()}, {num_threads} threads)"
        self._pool = module.ThreadPool(num_threads, list(cores))
        self._dtypes = {
            torch.float32: module.Dtype.float32,
            torch.bfloat16: module.Dtype.bfloat16,
            torch.float16: module.Dtype.float16,
        }
        self._formats = {
            torch.float32: module.MomentFormat.float32,
            torch.bfloat16: module.MomentFormat.bfloat16,
            torch.uint8: module.MomentFormat.block8,
        }

    def step(
        self,
        scalars: StepScalars,
        param: torch.Tensor,
        record: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        first_index: int,
        *,
        old: Old | None = None,
    ) -> None:
        """See `Kernels`."""
        names = [moment.name for moment in scalars.rule.moments]
        native.module.step(
            self._pool,
            getattr(native.module.Rule, scalars.rule.name),
            param.data_ptr(),
            self._dtypes[param.dtype],
            _address(record.get(REMAINDER.name, record.get(MASTER.name))),
            grad.data_ptr(),
            self._dtypes[grad.dtype],
            self._formats[record[names[0]].dtype],
            [(record[name].data_ptr(), _address(record.get(exponents_name(name)))) for name in names],
            param.numel(),
            scalars.values,
            first_index,
            scalars.seed,
            0 if old is None else old.param.data_ptr() - param.data_ptr(),
            0 if old is None else old.record[names[0]].data_ptr() - record[names[0]].data_ptr(),
        )

    def square_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        sums = _new_sums(grad)
        native.module.square_sums(self._pool, grad.data_ptr(), self._dtypes[grad.dtype], grad.numel(), sums.data_ptr())
        return sums

    def add(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        return self._arrive(native.module.Arrival.add, target, source)

    def replace(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        return self._arrive(native.module.Arrival.replace, target, source)

    def _arrive(self, arrival: Arrival, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        sums = _new_sums(target)
        native.module.arrive(
            self._pool,
            arrival,
            target.data_ptr(),
            self._dtypes[target.dtype],
            source.data_ptr(),
            self._dtypes[source.dtype],
            target.numel(),
            sums.data_ptr(),
        )
        return sums


def host_kernels(num_threads: int | None = None) -> Kernels:
    """Kernels for host memory: native ones where the module is there, else torch's.

    Without `num_threads`, as many as this rank's cores want; threads stay on those cores either way.
    """
    if native.available:
        share = this_ranks_cores()
        return NativeKernels(num_threads or share.num_threads, share.cores)
    return TorchKernels()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _new_sums(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(-(-tensor.numel() // reference.BLOCK_NUMEL), dtype=torch.float64)
