"""How fast the CPU moves memory, updates parameters and takes checksums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch

from zerooffload import native
from zerooffload.accelerator import Accelerator, populated_pages
from zerooffload.calibration.effort import Effort
from zerooffload.calibration.turns import Figure, repeated
from zerooffload.formats import MIB
from zerooffload.machine import available_host_bytes, this_ranks_cores
from zerooffload.optim.kernels import host_kernels
from zerooffload.optim.rules import RULES
from zerooffload.optim.rules.rule import step_scalars
from zerooffload.tiers.checksums import checksum

NUM_ARRAYS = 4
"""Parameters, gradients and two moments."""
_TRAFFIC_BYTES = 28
"""Of an fp32 parameter in AdamW: 16 are read and 12 written."""
_GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
_TOUCHED_BYTES = 4 * MIB
"""As large as results of operations are."""
_PINNED_BYTES = 256 * MIB
_PINNABLE_PART = 4


def host_figures(effort: Effort) -> Iterator[Figure]:
    """Those of `HostSpeeds`, all on the same arrays.

    Without the native module torch's operations move the memory, on as many threads as torch has.
    """
    numel = effort.array_bytes // 4
    param, grad, *moments = (populated_pages(4 * numel).view(torch.float32) for _ in range(NUM_ARRAYS))
    grad.normal_(generator=torch.Generator().manual_seed(0))
    rule = RULES["adamw"]
    record = {moment.name: array for moment, array in zip(rule.moments, moments, strict=True)}
    scalars = step_scalars(rule, _GROUP, 1, 1.0)
    update = partial(host_kernels().step, scalars, param, record, grad, 0)
    traffic = _SameTraffic(grad, [param, *moments])
    whole = grad.view(torch.uint8)
    for name, work, nbytes in (
        ("memory_bandwidth", traffic, traffic.nbytes),
        ("update_bandwidth", update, _TRAFFIC_BYTES * numel),
        ("checksum_bandwidth", partial(checksum, whole), whole.numel()),
    ):
        yield Figure(f"host.{name}", partial(_bytes_per_second, work, nbytes), effort.turn_seconds)
    touched = partial(_bytes_per_second, _touch_new_memory, _TOUCHED_BYTES)
    yield Figure("host.first_touch_bandwidth", touched, effort.turn_seconds)


def _bytes_per_second(work: Callable[[], object], nbytes: int, seconds: float) -> float:
    return nbytes * repeated(work, seconds)


def _touch_new_memory() -> None:
    """By as many threads as torch has; it is given back at once, as the memory of a large result."""
    pages = mmap(-1, _TOUCHED_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    torch.frombuffer(pages, dtype=torch.float32).fill_(1)


class _SameTraffic:
    """The update's traffic without its arithmetic; where torch must do it, an addition that costs as little.

    Attributes
    ----------
    nbytes : int
        Of a call, read and written.
    """

    def __init__(self, read: torch.Tensor, written: Sequence[torch.Tensor]) -> None:
        self._read = read
        self._written = list(written)
        self.nbytes = read.nbytes + 2 * sum(array.nbytes for array in written)
        if native.available:
            share = this_ranks_cores()
            self._pool = native.module.ThreadPool(share.num_threads, list(share.cores))

    def __call__(self) -> None:
        if native.available:
            streams = [(self._read.data_ptr(), 4, False), *((array.data_ptr(), 4, True) for array in self._written)]
            native.module.move_traffic(self._pool, streams, self._read.numel())
            return
        self._read.sum()
        for array in self._written:
            array.add_(1)


def pinnable_bytes(accelerator: Accelerator, seconds: float) -> int | None:
    """How much could be pinned until it failed; None if it did not.

    It is tried for that many seconds, with no more than a quarter of what is free; not where nothing is copied.
    """
    if accelerator.shares_host_memory:
        return None
    until, most_bytes = time.perf_counter() + seconds, available_host_bytes() // _PINNABLE_PART
    pinned: list[torch.Tensor] = []
    try:
        while time.perf_counter() < until and (len(pinned) + 1) * _PINNED_BYTES <= most_bytes:
            memory = populated_pages(_PINNED_BYTES)
            if not accelerator.pin(memory):
                return len(pinned) * _PINNED_BYTES
            pinned.append(memory)
        return None
    finally:
        for memory in pinned:
            accelerator.unpin(memory)
