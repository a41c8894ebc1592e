"""How fast the device computes, moves its memory, and is reached from the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from zerooffload.accelerator import Accelerator, Stream
from zerooffload.calibration.effort import Effort
from zerooffload.calibration.turns import Figure, repeated

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_WIDTH, _MOST_WIDTH = 64, 4096
_NUM_TRIALS = 3


def device_figures(accelerator: Accelerator, effort: Effort) -> Iterator[Figure]:
    """Those of `DeviceSpeeds`; of copies none where the device computes on host memory."""
    finish = partial(_finish, accelerator, accelerator.compute)
    seconds = effort.turn_seconds
    for name, dtype in _DTYPES.items():
        layer = _layer_for(seconds, dtype, accelerator.device, finish)
        yield Figure(f"device.matmul_flops.{name}", partial(_amount, layer, layer.flops, finish), seconds)
    added = _Addition(effort.array_bytes, accelerator.device)
    yield Figure("device.memory_bandwidth", partial(_amount, added, added.nbytes, finish), seconds)
    one = torch.zeros(1, device=accelerator.device)
    yield Figure("device.operation_seconds", partial(_seconds_each, partial(one.add_, 1), finish), seconds)
    if not accelerator.shares_host_memory:
        copies = _Copies(accelerator, effort.array_bytes)
        yield Figure("device.copy_in", copies.inwards, seconds)
        yield Figure("device.copy_out", copies.outwards, seconds)
        yield Figure("device.copy_both", copies.both, seconds)


class _Layer:
    """The three products of a linear layer from `width` to four times as much, for twice as many tokens.

    Attributes
    ----------
    flops : int
        Operations of a call: two for each multiplication with its addition.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        noise = torch.Generator(device).manual_seed(0)
        tokens, wide = 2 * width, 4 * width
        self._inputs, self._weight, self._grad = (
            torch.randn(shape, generator=noise, device=device).to(dtype)
            for shape in ((tokens, width), (wide, width), (tokens, wide))
        )
        self.flops = 3 * 2 * tokens * width * wide

    def __call__(self) -> None:
        _ = self._inputs @ self._weight.t()
        _ = self._grad @ self._weight
        _ = self._grad.t() @ self._inputs


def _layer_for(seconds: float, dtype: torch.dtype, device: torch.device, finish: Callable[[], None]) -> _Layer:
    """The widest one that can be called within a turn: a dtype that is slow here gets a small one."""
    width = _LEAST_WIDTH
    while True:
        layer = _Layer(width, dtype, device)
        # The first call of a shape is no measure: libraries look for a way then. Nor is one that others disturb.
        call_seconds = min(_seconds_of(layer, finish) for _ in range(_NUM_TRIALS))
        if width == _MOST_WIDTH or 8 * call_seconds > seconds:
            return layer
        width *= 2


def _seconds_of(work: Callable[[], object], finish: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - start


class _Addition:
    """The sum of two fp32 arrays goes to a third."""

    def __init__(self, array_bytes: int, device: torch.device) -> None:
        self._arrays = [torch.ones(array_bytes // 4, device=device) for _ in range(3)]
        self.nbytes = 3 * array_bytes

    def __call__(self) -> None:
        left, right, total = self._arrays
        torch.add(left, right, out=total)


class _Copies:
    """Between host buffers as a run has them and ranges of the device."""

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        self._accelerator = accelerator
        self._nbytes = nbytes
        self._sources = [accelerator.host_buffer(nbytes) for _ in range(2)]
        self._ranges = [accelerator.reserve(nbytes) for _ in range(2)]
        for memory in self._ranges:
            memory.fill()
        accelerator.compute.wait(accelerator.record(accelerator.copy_in))
        self._ranges[1].tensor.fill_(1)
        # What is copied out was written by compute.
        accelerator.copy_out.wait(accelerator.record(accelerator.compute))

    def inwards(self, seconds: float) -> float:
        """Bytes a second."""
        return self._one_way(self._accelerator.copy_in, self._ranges[0].tensor, self._sources[0], seconds)

    def outwards(self, seconds: float) -> float:
        """Bytes a second."""
        return self._one_way(self._accelerator.copy_out, self._sources[1], self._ranges[1].tensor, seconds)

    def both(self, seconds: float) -> float:
        """Bytes a second of both directions, each kept busy by a thread of its own, as they need not be alike."""
        with ThreadPoolExecutor(2) as threads:
            ways = [threads.submit(way, seconds) for way in (self.inwards, self.outwards)]
            return sum(way.result() for way in ways)

    def _one_way(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, seconds: float) -> float:
        copy = partial(self._accelerator.copy, stream, target, source)
        return _amount(copy, self._nbytes, partial(_finish, self._accelerator, stream), seconds)


def _amount(work: Callable[[], object], amount: int, finish: Callable[[], None], seconds: float) -> float:
    return amount * repeated(work, seconds, finish)


def _seconds_each(work: Callable[[], object], finish: Callable[[], None], seconds: float) -> float:
    return 1 / repeated(work, seconds, finish)


def _finish(accelerator: Accelerator, stream: Stream) -> None:
    accelerator.record(stream).wait()
