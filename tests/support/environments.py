"""Environments for runs: the real CPU, and devices and drives that are simulated."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.cuda_on_cpu import cuda_on_cpu
from support.reference_training import Recipe, train_offloaded
from support.simulated_accelerator import Copies, SimulatedAccelerator
from support.simulated_engine import Fault, SimulatedEngine, Transfers
from support.straight_reads import StraightEngine

import zerooffload as zo
from zerooffload.accelerator import Accelerator
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.entry import offloading
from zerooffload.optim.kernels import Kernels, host_kernels
from zerooffload.runtime.build import Environment
from zerooffload.sharding.collectives import Collectives
from zerooffload.telemetry import Waits
from zerooffload.telemetry.recorder import CountingRecorder

Homes = tuple[str, str, str]
"""Tiers of parameters, optimizer states and gradients."""
TIERS = ("device", "host", "nvme")
COMBINATIONS: list[Homes] = list(itertools.product(TIERS, TIERS, TIERS))
PAIRWISE: list[Homes] = [(a, b, TIERS[(2 * i + 2 * j) % 3]) for i, a in enumerate(TIERS) for j, b in enumerate(TIERS)]
"""Every pair of tiers for every pair of states."""

MakeWaits = Callable[[CountingRecorder], Waits]


@contextmanager
def simulated(
    copies: Copies = Copies.LATE,
    transfers: Transfers = Transfers.LAZY,
    *,
    faults: Iterable[Fault] = (),
    make_waits: MakeWaits = Waits,
    on_files: bool = False,
    straight: bool = False,
    seed: int = 0,
) -> Iterator[Environment]:
    """A device with memory of its own, and a drive in memory, or on the files themselves.

    With `straight` the drive can write to the device's memory.
    """
    accelerator = SimulatedAccelerator(copies, seed=seed)
    make_engine = partial(StraightEngine, accelerator) if straight else SimulatedEngine
    engine = make_engine(transfers, faults=faults, on_files=on_files, seed=seed)
    try:
        yield _environment(accelerator, engine, make_waits)
    finally:
        accelerator.close()


@contextmanager
def simulated_devices(
    make_waits: MakeWaits = Waits, *, on_files: bool = False, straight: bool = False
) -> Iterator[None]:
    """`zo.offload` takes a simulated device and drive, in memory or on the files themselves, each time new ones."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def environment(_config: object, _accelerator: object, collectives: Collectives) -> Environment:
            made = stack.enter_context(simulated(make_waits=make_waits, on_files=on_files, straight=straight))
            return replace(made, collectives=collectives)

        patch.setattr(offloading, "environment", environment)
        yield


@contextmanager
def cuda_devices() -> Iterator[None]:
    """`zo.offload` takes the accelerator for CUDA, on tensors of the CPU, and simulated drives."""
    with cuda_on_cpu() as (accelerator, _), pytest.MonkeyPatch.context() as patch:

        def environment(_config: object, _accelerator: object, collectives: Collectives) -> Environment:
            return replace(_environment(accelerator, SimulatedEngine(), Waits), collectives=collectives)

        patch.setattr(offloading, "environment", environment)
        yield
        gc.collect()


def cpu_with_simulated_drive(
    transfers: Transfers = Transfers.LAZY,
    *,
    faults: Iterable[Fault] = (),
    make_waits: MakeWaits = Waits,
    on_files: bool = False,
) -> Environment:
    """Computes on host memory, with a drive in memory, or on the files themselves."""
    return _environment(CpuAccelerator(), SimulatedEngine(transfers, faults=faults, on_files=on_files), make_waits)


def _environment(
    accelerator: Accelerator, engine: SimulatedEngine, make_waits: MakeWaits, kernels: Kernels | None = None
) -> Environment:
    return Environment(
        accelerator=accelerator,
        open_engine=lambda: engine,
        commit_in_background=False,
        path_speeds=lambda paths: [1.0] * len(paths),
        kernels=kernels or host_kernels(1),
        make_waits=make_waits,
    )


def least_memory(recipe: Recipe, environment: Environment | None, budget: str, **config: Any) -> int:
    """The least `budget` ("device_memory", ...) with which a run starts, as the refusal of less says."""
    with pytest.raises(zo.BudgetError, match=r"it needs \d+ bytes") as refused:
        train_offloaded(recipe, environment, **{**config, budget: 0})
    found = re.search(r"it needs (\d+) bytes", str(refused.value))
    return int(found.group(1)) if found else 0
