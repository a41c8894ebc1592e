"""How much of a step's work is hidden: its time beside the longest of its parts, and beside their sum.

A stack of blocks trains from the tiers of a placement. On the simulated device compute and copies only take time (they
sleep), so that a machine with few cores can stand for one with a GPU; the drive, the CPU's kernel and the hooks are
real. With `--device cpu` or `cuda` the blocks are matrix products. Compute is made as long as what the slowest link
needs for a step's bytes, or `--compute-ratio` times that.

The floor is computed from a step's bytes (floors.py; the formulas are in zerooffload/docs/overlap.md) and from what
each link does alone, measured before and after each round of steps: the drive by disk_limit.c at the step's ratio of
reads to writes, the update's kernel on arrays in memory and as mere traffic, and copies.

    python benchmarks/overlap.py /mnt/nvme --placement all-nvme --trace overlap.json
    python benchmarks/overlap.py /mnt/nvme --suite --json overlap.json

A step's time is that from one return of `optimizer.step()` to the next. A missed target does not change the exit
status; bytes that are not those of the formula do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from disk_limit import (
    DiskLimit,
    Mix,
    Setting,
    check,
    count,
    lay_out,
    machine,
    positive,
    refuse_wrong_bytes,
    scratch_folder,
    spread,
    tell,
    versions,
)
from floors import (
    FP32_BYTES,
    KERNEL_BYTES,
    Speeds,
    StepDemand,
    Tier,
    Workload,
    expected_bytes,
    floor_seconds,
    mix_of,
    slowest_link,
    step_demand,
    sum_seconds,
)
from kernel_arrays import Configuration, Memory, OurStep, Traffic
from sleeping_device import GRADIENT, SleepingAccelerator
from torch import nn

import zerooffload as zo
from zerooffload.accelerator import Accelerator, populated_pages
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import choose_engine
from zerooffload.config import UpdateMode
from zerooffload.entry.offloading import offload_in
from zerooffload.formats import GIB, MIB, format_bytes
from zerooffload.optim.kernels import host_kernels
from zerooffload.planner.cost import StepKind, estimate
from zerooffload.planner.placement import CHUNK_NUMEL
from zerooffload.planner.profiles import (
    DeviceSpeeds,
    HostSpeeds,
    MachineProfile,
    MixedRate,
    ModelProfile,
    PassWork,
    UnitWork,
)
from zerooffload.planner.profiles import Drive as PaperDrive
from zerooffload.runtime.build import Environment
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import StepReport

PLACEMENTS = {
    "all-nvme": (Tier.NVME, Tier.NVME, Tier.NVME),
    "optimizer-nvme": (Tier.HOST, Tier.NVME, Tier.HOST),
    "all-host": (Tier.HOST, Tier.HOST, Tier.HOST),
}
"""Homes of parameters, optimizer state and gradients."""
SECOND_PLACE_BYTES = {"all-nvme": 0, "optimizer-nvme": 5, "all-host": 13}
"""Of host memory for each parameter, beyond the least: room for second places of what lives there."""
NUM_COLLECTION_UNITS = 2
NO_CLIP, CLIP = 1e9, 1e-3
SPIKE = 1e12
SPIKES_EVERY = 10
NUM_WARM_UP_STEPS = 5
BYTES_TOLERANCE = 0.02
LINK_GB_PER_SECOND = 25.0
"""What a GPU on 16 lanes of PCIe 4.0 copies from and to pinned memory."""
PROBE_NUMEL = 2**24
NUM_PROBES = 3
GRID_SECONDS = 0.5
DISK_TURN_SECONDS = 1.0
MOST_OF_MAXIMUM, MOST_OF_COMPUTE, MOST_OF_FLOOR_UNDER_COMPUTE = 1.10, 1.03, 1.05


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is trained, and how."""

    placement: str
    update: str = "auto"
    compute_ratio: float = 1.0
    accumulation: int = 1
    micro_batches: int = 1
    clip: str = "never"
    device: str = "simulated"

    @property
    def name(self) -> str:
        """What differs from the simplest."""
        words = [self.placement]
        words += [] if self.update == "auto" else [self.update]
        words += [] if self.compute_ratio == 1 else [f"compute x {self.compute_ratio:g}"]
        words += [] if self.accumulation == 1 else [f"accumulation {self.accumulation}"]
        words += [] if self.micro_batches == 1 else [f"micro-batches {self.micro_batches}"]
        words += [] if self.clip == "never" else [f"clips {self.clip}"]
        words += [] if self.device == "simulated" else [self.device]
        return ", ".join(words)

    @property
    def schedule(self) -> UpdateMode:
        """When the update may run."""
        if self.update != "auto":
            return UpdateMode(self.update)
        if self.device == "cpu" and self.placement == "all-host":
            return UpdateMode.AFTER_BACKWARD
        return UpdateMode.UNDER_NEXT_FORWARD if self.clip == "always" else UpdateMode.DURING_BACKWARD


SUITE = (
    *(Point(placement=name) for name in PLACEMENTS),
    *(Point(placement=name, accumulation=4) for name in PLACEMENTS),
    *(Point(placement=name, clip="always") for name in PLACEMENTS),
    *(Point(placement=name, compute_ratio=3.0) for name in PLACEMENTS),
)


# --- what is trained


class _Asleep(torch.autograd.Function):
    """A block on the simulated device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: SleepingBlock, *weights: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.shapes = block, [weight.shape for weight in weights]
        block.device.compute.sleep(block.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        block = ctx.block
        block.device.compute.sleep(2 * block.seconds)
        # A tensor of its own each, so that autograd takes it and copies nothing.
        return grads[0], None, *(block.gradient.view(shape) for shape in ctx.shapes)


class SleepingBlock(nn.Module):
    """Two weights, and nothing to compute with them.

    Attributes
    ----------
    seconds : float
        Of its forward; its backward takes twice as long.
    """

    def __init__(self, width: int, device: SleepingAccelerator, gradient: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(width, width, device="meta")) for _ in range(2))
        self.device, self.gradient, self.seconds = device, gradient, 0.0

    def reset_parameters(self) -> None:
        """Called when the values get their home."""
        nn.init.normal_(self.first)
        nn.init.normal_(self.second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Some time later, the same."""
        y: torch.Tensor = _Asleep.apply(x, self, self.first, self.second)
        return y


class ProductBlock(nn.Module):
    """Two matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(width, width, device="meta")) for _ in range(2))

    def reset_parameters(self) -> None:
        """Called when the values get their home."""
        nn.init.normal_(self.first, std=self.first.shape[0] ** -0.5)
        nn.init.normal_(self.second, std=self.first.shape[0] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a rectifier between them, and the input added."""
        y: torch.Tensor = x + torch.relu(x @ self.first.t()) @ self.second.t()
        return y


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean."""
        for block in self.blocks:
            x = block(x)
        return x.mean()


class Compute:
    """What a device computes with, and how long it takes for it."""

    def __init__(self, point: Point, width: int, link_gb_per_second: float) -> None:
        self.width = width
        self.num_rows = 1
        self.accelerator: Accelerator = _accelerator(point.device, link_gb_per_second)
        self._num_slices = point.micro_batches
        self._num_backwards = point.accumulation * point.micro_batches
        self._computes_again = point.micro_batches > 1
        self._blocks: list[nn.Module] = []

    def model(self, num_blocks: int) -> Stack:
        """A new one."""
        self._blocks = [self._block() for _ in range(num_blocks)]
        return Stack(self._blocks)

    def _block(self) -> nn.Module:
        if isinstance(self.accelerator, SleepingAccelerator):
            return SleepingBlock(self.width, self.accelerator, self._gradient(self.accelerator))
        return ProductBlock(self.width)

    def _gradient(self, device: SleepingAccelerator) -> torch.Tensor:
        """One for all weights, in the device's memory, where sums are left out."""
        if self._blocks:
            return self._blocks[0].gradient
        memory = device.reserve(FP32_BYTES * self.width**2)
        return memory.tensor.view(torch.float32).view(self.width, self.width)

    @property
    def _parts(self) -> int:
        """Of a backward of one slice and the forwards before it, a forward is one, and its gradients are two."""
        return 4 if self._computes_again else 3

    def take(self, seconds: float) -> None:
        """Let all forwards and backwards of a step take so long together."""
        if isinstance(self.accelerator, SleepingAccelerator):
            for block in self._blocks:
                block.seconds = seconds / self._num_backwards / len(self._blocks) / self._parts
            return
        self.num_rows = 16
        for _ in range(3):
            took = self.seconds()
            self.num_rows = max(1, round(self.num_rows * seconds / took))

    def seconds(self) -> float:
        """What a step's compute takes alone."""
        if isinstance(self.accelerator, SleepingAccelerator):
            return sum(self._parts * block.seconds for block in self._blocks) * self._num_backwards
        block = ProductBlock(self.width).to_empty(device=self.accelerator.device)
        block.reset_parameters()
        took = []
        for _ in range(NUM_PROBES + 1):
            x = self._sample().requires_grad_()
            self._wait()
            begin = time.perf_counter()
            if self._computes_again:
                block(x)
            block(x).mean().backward()
            self._wait()
            took.append(time.perf_counter() - begin)
            block.zero_grad()
        return statistics.median(took[1:]) * len(self._blocks) * self._num_backwards

    def _wait(self) -> None:
        self.accelerator.record(self.accelerator.compute).wait()

    def batch(self) -> torch.Tensor:
        """An input; in slices, a sample is what the usual order has as a batch."""
        if isinstance(self.accelerator, SleepingAccelerator):
            return torch.zeros(self._num_slices)
        samples = (self._num_slices,) if self._num_slices > 1 else ()
        return torch.randn(*samples, self.num_rows, self.width, device=self.accelerator.device)

    def _sample(self) -> torch.Tensor:
        return self.batch() if self._num_slices == 1 else self.batch()[:1]

    def operations(self) -> AbstractContextManager[Any]:
        """A context for a backward."""
        device = self.accelerator
        return device.operations() if isinstance(device, SleepingAccelerator) else nullcontext()

    @property
    def idle(self) -> Mapping[str, float]:
        """Seconds in which the simulated device's compute stood still so far: behind copies, and without work."""
        if not isinstance(self.accelerator, SleepingAccelerator):
            return {}
        queue = self.accelerator.compute
        return {"behind copies": queue.behind_seconds, "without work": queue.starved_seconds}

    def close(self) -> None:
        """End threads."""
        if isinstance(self.accelerator, SleepingAccelerator):
            self.accelerator.close()


def _accelerator(kind: str, link_gb_per_second: float) -> Accelerator:
    if kind == "simulated":
        return SleepingAccelerator(link_gb_per_second * 1e9 or None)
    if kind == "cpu":
        return CpuAccelerator()
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device")
    from zerooffload.accelerator.cuda import CudaAccelerator  # noqa: PLC0415 - only where there is CUDA

    return CudaAccelerator(torch.device("cuda", torch.cuda.current_device()))


class Trainer:
    """A model that trains from the tiers of a point's placement."""

    def __init__(self, folder: Path, point: Point, compute: Compute, args: argparse.Namespace) -> None:
        self._point, self._compute = point, compute
        block_numel = 2 * compute.width**2
        self.num_units = max(2, round(args.params / block_numel))
        self.num_params = self.num_units * block_numel
        self._folder, self._args = folder, args
        homes = PLACEMENTS[point.placement]
        unit_bytes = compute.accelerator.range_nbytes(FP32_BYTES * block_numel)
        self._device_memory = (args.window_units + NUM_COLLECTION_UNITS) * unit_bytes
        self._in_slices = point.micro_batches > 1
        if self._in_slices:
            # Inputs of blocks, and the sums of a block's gradients.
            self._device_memory += args.activation_memory + FP32_BYTES * block_numel
        self._homes = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
        self.host_bytes = args.host_memory or self._least_host_bytes() + SECOND_PLACE_BYTES[point.placement] * (
            self.num_params
        )
        self._model = self._offloaded(self.host_bytes)
        if not self._in_slices:
            self._leave_out_collecting()
        self._optimizer = zo.AdamW(self._model.parameters(), lr=1e-4)
        self.num_steps = 0
        self.reports: list[StepReport] = []
        self.bytes_moved: Counter[str] = Counter()

    def _offloaded(self, host_bytes: int) -> Stack:
        config = zo.OffloadConfig(
            **{state: tier.value for state, tier in self._homes.items()},
            nvme_paths=(self._folder,) if Tier.NVME in self._homes.values() else (),
            device_memory=self._device_memory if not self._compute.accelerator.shares_host_memory else None,
            host_memory=host_bytes,
            units=[SleepingBlock, ProductBlock],
            update=self._point.update,
            accumulation_steps=self._point.accumulation,
            micro_batch_size=1 if self._in_slices else None,
            activation_memory={"device": self._args.activation_memory} if self._in_slices else {},
            io_engine=self._args.engine,
        )
        environment = Environment(
            accelerator=self._compute.accelerator,
            open_engine=lambda: choose_engine(config.io_engine, config.nvme_paths[0]).engine,
            kernels=host_kernels(self._args.threads),
        )
        return offload_in(self._compute.model(self.num_units), config, environment)

    def _leave_out_collecting(self) -> None:
        """On the simulated device collecting gradients costs the host nothing: a context around no more than that."""
        gradients = self._run()._gradients
        collect = gradients._collect

        def collected(*args: Any) -> None:
            with self._compute.operations():
                collect(*args)

        gradients._collect = collected

    def _least_host_bytes(self) -> int:
        """What a run with no room to spare needs, as the refusal of less says."""
        try:
            self._offloaded(0)
        except zo.BudgetError as error:
            words = str(error).split("it needs ")[1].split()
            least = int(words[0])
            # On a CPU the window of parameters is host memory.
            window = self._device_memory if self._compute.accelerator.shares_host_memory else 0
            return least + window
        raise RuntimeError("a run without host memory was not refused")

    def workload(self, compute_seconds: float) -> Workload:
        """What a step is to do."""
        run = self._run()
        ring = run._resources.ring
        return Workload(
            num_params=self.num_params,
            num_units=self.num_units,
            num_kept_units=self._kept_units(),
            **self._homes,
            num_cached=min(self.num_params, (ring.num_slots - ring.num_working) * self._chunk_numel),
            accumulation=self._point.accumulation,
            computes_again=self._in_slices,
            copies=self.copies,
            copy_passes=self._copy_passes,
            commits=run._resources.commits is not None,
            compute_seconds=compute_seconds,
        )

    @property
    def copies(self) -> bool:
        """Whether the device has memory of its own."""
        return not self._compute.accelerator.shares_host_memory

    @property
    def _copy_passes(self) -> int:
        """Over host memory."""
        device = self._compute.accelerator
        if not isinstance(device, SleepingAccelerator):
            return 1
        return 2 if device.link_bytes_per_second is None else 0

    @property
    def _chunk_numel(self) -> int:
        return min(CHUNK_NUMEL, self.num_params // self.num_units)

    @property
    def slack_bytes(self) -> int:
        """By which a step may read less: what the working slots of the ring still hold where the order turns."""
        ring = self._run()._resources.ring
        return int(ring.num_working * ring.buffers[0].numel()) if ring.buffers else 0

    def _kept_units(self) -> int:
        unit_bytes = self._compute.accelerator.range_nbytes(FP32_BYTES * (self.num_params // self.num_units))
        return int(self._run()._residency._window_nbytes // unit_bytes)

    def predicted_seconds(self, speeds: Speeds, compute_seconds: float) -> float:
        """What the planner says of a step, from what each link does alone."""
        plan = self._run()._resources.plan
        point = self._point
        parts = 4 if self._in_slices else 3
        forward = compute_seconds / parts / self.num_units / point.accumulation
        works = tuple(
            UnitWork(
                name=unit.name,
                forward=PassWork(flops={"fp32": forward * bool(unit.flats)}),
                backward=PassWork(flops={"fp32": 2 * forward * bool(unit.flats)}),
                input_nbytes=0,
                saved_nbytes=0,
                forward_peak_nbytes=0,
                backward_peak_nbytes=0,
            )
            for unit in plan.placement.units
        )
        names = frozenset(work.name for work in works) if self._in_slices else frozenset()
        kind = StepKind(schedule=point.schedule, accumulation=point.accumulation, computed_again=names, clips=True)
        model = ModelProfile(name="", batch_size=1, sequence_length=1, units=works, peak_nbytes=0, saved_nbytes=0)
        has_drive = Tier.NVME in self._homes.values()
        machine = paper_machine(speeds, shares_host=not self.copies, has_drive=has_drive)
        return estimate(plan, model, machine, kind).seconds

    def step(self) -> None:
        """One turn of a training loop."""
        self._set_spike(self._point.clip == "sometimes" and self.num_steps % SPIKES_EVERY == 0)
        for _ in range(self._point.accumulation):
            loss = self._model(self._compute.batch())
            # Sums over slices are the device's work too.
            with self._compute.operations() if self._in_slices else nullcontext():
                loss.backward()
        zo.clip_grad_norm_(self._model, {"always": CLIP, "never": NO_CLIP, "sometimes": SPIKE / 2}[self._point.clip])
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        report = zo.step_report(self._model)
        self.reports.append(report)
        self.bytes_moved.update(report.bytes_moved)

    def _set_spike(self, is_high: bool) -> None:  # noqa: FBT001
        """Let the last gradient to come be so large that the step is clipped."""
        collection = self._run().units[0].parts[0].collection
        if self._point.clip == "sometimes" and isinstance(self._compute.accelerator, SleepingAccelerator):
            collection.tensor.view(torch.float32)[0] = SPIKE if is_high else GRADIENT

    def settle(self) -> None:
        """Finish what a training loop would find time for in its next step."""
        run = self._run()
        run._updates.wait_idle()
        if run._resources.commits is not None:
            run._resources.commits.settle()
        self.bytes_moved.update(run._parts.recorder.take().bytes_moved)

    def forget_counts(self) -> None:
        """Count from here on."""
        self.reports.clear()
        self.bytes_moved.clear()
        self.num_steps = 0

    def trace(self, path: Path | None) -> AbstractContextManager[None]:
        """What takes place, as a file, if one is wanted."""
        return zo.trace(self._model, path) if path is not None else nullcontext()

    def close(self) -> None:
        """End the run."""
        zo.close(self._model)

    def _run(self) -> Any:
        residence = residence_of(next(self._model.parameters()))
        if residence is None:
            raise RuntimeError("the model is not offloaded")
        return residence.run


def paper_machine(speeds: Speeds, *, shares_host: bool, has_drive: bool) -> MachineProfile:
    """These speeds as the planner wants them; compute is told in seconds, so a second is an operation."""
    return MachineProfile(
        name="measured",
        device=DeviceSpeeds(
            memory=GIB,
            shares_host_memory=shares_host,
            matmul_flops={"fp32": 1.0},
            memory_bandwidth=speeds.host_traffic,
            copy_in=speeds.copy,
            copy_out=speeds.copy,
        ),
        host=HostSpeeds(
            memory=GIB,
            cores=1,
            memory_bandwidth=speeds.host_traffic,
            update_bandwidth=speeds.kernel * KERNEL_BYTES,
        ),
        drives=(_paper_drive(speeds),) if has_drive else (),
    )


def _paper_drive(speeds: Speeds) -> PaperDrive:
    mixed = MixedRate(read_part=0.5, rate=speeds.disk((1, 1)))
    return PaperDrive(path="", read=speeds.disk((1, 0)), write=speeds.disk((0, 1)), mixed=(mixed,))


# --- what each link does alone


class Links:
    """Measures links, again and again: whatever else runs here slows them too.

    Parameters
    ----------
    stack : ExitStack
        Ends what is opened.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._args = args
        self._limit: DiskLimit | None = None
        self._settings: dict[Mix, list[Setting]] = {}
        self._folder = folder
        memory = Memory(args.probe_numel)
        self._step = OurStep(Configuration("adamw"), memory, host_kernels(args.threads))
        self._traffic = list(
            Traffic(host_kernels(args.threads)._pool, self._step.passes()).variants("traffic").values()
        )
        self._source, self._target = (populated_pages(args.probe_numel * FP32_BYTES) for _ in range(2))
        self._copier = SleepingAccelerator(args.link_gb_per_second * 1e9 or None)
        self.limit_names: dict[str, str] = {}

    def prepare(self, demands: Sequence[Any]) -> list[Mix]:
        """The mixes of these parts of a step; when one first comes, the drive's best settings for it are searched."""
        mixes = []
        for demand in demands:
            reads, writes = mix_of(demand)
            if reads or writes:
                mixes.append(Mix(f"{reads}:{writes}", reads, writes))
        new = [mix for mix in dict.fromkeys(mixes) if mix not in self._settings]
        if new:
            self._settings |= self._disk().finalists(new, self._args.grid_seconds)
        return list(dict.fromkeys(mixes))

    def _disk(self) -> DiskLimit:
        if self._limit is None:
            file, nbytes = self._folder / "limit.bin", int(self._args.limit_gib * GIB) // MIB * MIB
            lay_out(file, nbytes)
            self._limit = DiskLimit(self._folder, file, nbytes)
        return self._limit

    def turn(self, mixes: Sequence[Mix]) -> Speeds:
        """Each once."""
        disk = {}
        for mix in mixes:
            rates = {
                setting: self._disk().turn(setting, mix, self._args.disk_turn_seconds).bytes_per_second
                for setting in self._settings[mix]
            }
            best = max(rates, key=rates.__getitem__)
            disk[mix.reads, mix.writes] = rates[best]
            self.limit_names[mix.name] = str(best)
        kernel = _least_seconds([self._step])
        traffic = _least_seconds(self._traffic)
        return Speeds(
            disk=partial(_at_nearest, disk),
            copy=self._source.numel() / _least_seconds([self._copy]),
            kernel=self._args.probe_numel / kernel,
            host_traffic=self._args.probe_numel * self._step.bytes_per_param / traffic,
        )

    def _copy(self) -> None:
        piece = 8 * MIB
        queue = self._copier.copy_in
        for target, source in zip(self._target.split(piece), self._source.split(piece), strict=True):
            self._copier.copy(queue, target, source)
        queue.record().wait()

    def close(self) -> None:
        """End threads."""
        self._copier.close()


def _at_nearest(rates: Mapping[tuple[int, int], float], mix: tuple[int, int]) -> float:
    """The rate of the mix that is most like this one: sections of other schedules are not measured for themselves."""
    return rates[min(rates, key=lambda one: abs(one[0] / sum(one) - mix[0] / sum(mix)))]


def _least_seconds(contenders: Sequence[Callable[[], object]]) -> float:
    """Of the fastest: the median of a few calls."""
    medians = []
    for contender in contenders:
        took = []
        for _ in range(NUM_PROBES):
            begin = time.perf_counter()
            contender()
            took.append(time.perf_counter() - begin)
        medians.append(statistics.median(took))
    return min(medians)


# --- a point


@dataclass(frozen=True)
class Round:
    """Timed steps, with what follows from what the links did before and after."""

    step_seconds: list[float]
    floor_seconds: float
    compute_seconds: float
    maximum_seconds: float
    sum_seconds: float
    idle_seconds: Mapping[str, float]


def round_of(
    seconds: list[float],
    step: StepDemand,
    schedule: UpdateMode,
    around: tuple[Speeds, Speeds],
    idle_seconds: Mapping[str, float],
) -> Round:
    """Floors are means of those by two measurements."""
    return Round(
        seconds,
        statistics.mean(floor_seconds(step, schedule, speeds) for speeds in around),
        step.total.compute_seconds,
        statistics.mean(max(speeds.seconds(step.total).values()) for speeds in around),
        statistics.mean(sum_seconds(step, speeds) for speeds in around),
        idle_seconds,
    )


@dataclass(frozen=True)
class Measured:
    """All rounds of a point, the reports of their timed steps, and the last speeds of the links."""

    rounds: Sequence[Round]
    reports: Sequence[StepReport]
    speeds: Speeds


def measured(
    point: Point, trainer: Trainer, compute: Compute, links: Links, args: argparse.Namespace
) -> dict[str, Any]:
    """The row of a point."""

    def demand(seconds: float) -> StepDemand:
        return step_demand(trainer.workload(seconds))

    mixes = links.prepare([*demand(0.0).sections(point.schedule), demand(0.0).total])
    before = links.turn(mixes)
    compute.take(point.compute_ratio * slowest_link(demand(0.0), before)[1])
    for _ in range(args.warm_up):
        trainer.step()
    trainer.settle()
    trainer.forget_counts()
    rounds: list[Round] = []
    reports: list[StepReport] = []
    with trainer.trace(args.trace):
        for number in range(args.rounds):
            print(f"{point.name}: round {number + 1} of {args.rounds}", file=sys.stderr)
            compute.take(point.compute_ratio * slowest_link(demand(0.0), before)[1])
            took = compute.seconds()
            # The first step of a round has no update of the one before to hide.
            trainer.step()
            idle = compute.idle
            seconds = []
            for _ in range(args.steps):
                begin = time.perf_counter()
                trainer.step()
                seconds.append(time.perf_counter() - begin)
            idle = {cause: (now - idle[cause]) / args.steps for cause, now in compute.idle.items()}
            reports += trainer.reports[-args.steps :]
            trainer.settle()
            after = links.turn(mixes)
            rounds.append(round_of(seconds, demand(took), point.schedule, (before, after), idle))
            before = after
    return row_of(point, trainer, links, Measured(rounds, reports, before))


def row_of(point: Point, trainer: Trainer, links: Links, found: Measured) -> dict[str, Any]:
    """What a point's rounds say."""
    rounds, reports, speeds = found.rounds, found.reports, found.speeds
    step = step_demand(trainer.workload(rounds[-1].compute_seconds))
    means = [statistics.mean(one.step_seconds) for one in rounds]
    # Where the device has no memory of its own, copies are no link.
    has_link = {"copy_in": trainer.copies, "copy_out": trainer.copies}
    expected = {
        name: value * trainer.num_steps for name, value in expected_bytes(step).items() if has_link.get(name, True)
    }
    moved = {name: trainer.bytes_moved[name] for name in expected}
    sections = [speeds.seconds(section) for section in step.sections(point.schedule)]
    return {
        "name": point.name,
        "point": vars(point),
        "parameters": trainer.num_params,
        "units": trainer.num_units,
        "kept_units": trainer.workload(0.0).num_kept_units,
        "host_budget_bytes": trainer.host_bytes,
        "schedule": point.schedule.value,
        "step_seconds": spread([value for one in rounds for value in one.step_seconds]),
        "compute_seconds": spread([one.compute_seconds for one in rounds]),
        "floor_seconds": spread([one.floor_seconds for one in rounds]),
        "predicted_seconds": trainer.predicted_seconds(speeds, rounds[-1].compute_seconds),
        "maximum_seconds": spread([one.maximum_seconds for one in rounds]),
        "sum_seconds": spread([one.sum_seconds for one in rounds]),
        "ratio_to_floor": spread([mean / one.floor_seconds for mean, one in zip(means, rounds, strict=True)]),
        "ratio_to_compute": spread([mean / one.compute_seconds for mean, one in zip(means, rounds, strict=True)]),
        "ratio_to_maximum": spread([mean / one.maximum_seconds for mean, one in zip(means, rounds, strict=True)]),
        "ratio_to_sum": spread([mean / one.sum_seconds for mean, one in zip(means, rounds, strict=True)]),
        "floor_by_schedule": {name.value: floor_seconds(step, name, speeds) for name in UpdateMode},
        "links_seconds": speeds.seconds(step.total),
        "sections_seconds": sections,
        "bound": [max(section, key=section.__getitem__) for section in sections],
        "limits": dict(links.limit_names),
        "bytes": {name: {"expected": expected[name], "moved": moved[name]} for name in expected},
        "read_slack_bytes": trainer.slack_bytes * trainer.num_steps,
        "wait_seconds": _medians([report.waits for report in reports]),
        "work_seconds": _medians([report.work for report in reports]),
        "hidden_work_seconds": _medians([report.hidden_work for report in reports]),
        "device_idle_seconds": _medians([one.idle_seconds for one in rounds]),
        "repetitions": [vars(one) for one in rounds],
    }


def _medians(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    causes = sorted({cause for one in counts for cause in one})
    return {cause: statistics.median(one.get(cause, 0.0) for one in counts) for cause in causes}


def checks_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's figures that are aimed at."""
    name, point = row["name"], row["point"]
    checks = []
    if point["device"] == "simulated" and point["clip"] != "sometimes" and point["update"] == "auto":
        if point["compute_ratio"] < 3:
            checks.append(
                check(f"{name}: step, of the floor", row["ratio_to_floor"]["median"], MOST_OF_MAXIMUM, "lower")
            )
        else:
            compute, floor = row["compute_seconds"]["median"], row["floor_seconds"]["median"]
            most = max(MOST_OF_COMPUTE, MOST_OF_FLOOR_UNDER_COMPUTE * floor / compute if floor > compute * 1.001 else 0)
            checks.append(check(f"{name}: step, of compute", row["ratio_to_compute"]["median"], most, "lower"))
    if point["clip"] != "sometimes":
        for link, counted in row["bytes"].items():
            if not counted["expected"]:
                off = float(counted["moved"])
            else:
                slack = row["read_slack_bytes"] if link == "nvme_read" else 0
                short = max(0.0, counted["expected"] - counted["moved"] - slack)
                off = max(short, counted["moved"] - counted["expected"]) / counted["expected"]
            checks.append(check(f"{name}: bytes of {link}, off the formula", off, BYTES_TOLERANCE, "lower"))
    return checks


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    step, floor, compute = (row[f"{what}_seconds"]["median"] for what in ("step", "floor", "compute"))
    ratio = row["ratio_to_floor"]
    print(
        f"{row['name']:44}{step:8.3f}{floor:8.3f}{compute:9.3f}{row['sum_seconds']['median']:8.3f}"
        f"{ratio['median']:9.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]{row['ratio_to_sum']['median']:8.3f}"
        f"  {' + '.join(row['bound'])}"
    )
    predicted = row["predicted_seconds"]
    print(f"    on paper: {predicted:.3f} s, {predicted / step:.3f} of the step")
    floors = ", ".join(f"{name} {value:.3f}" for name, value in row["floor_by_schedule"].items())
    print(f"    floors: {floors}")
    for what in ("links", "device_idle", "wait", "work", "hidden_work"):
        words = ", ".join(f"{cause} {value:.3f}" for cause, value in row[f"{what}_seconds"].items() if value >= 5e-4)
        print(f"    {what.replace('_', ' ')}: {words or 'nothing'}")


@contextmanager
def prepared(args: argparse.Namespace, nbytes: int) -> Iterator[tuple[Path, Links]]:
    """A folder, and the links."""
    with scratch_folder(args.path, nbytes) as folder, ExitStack() as stack:
        links = Links(folder, args)
        stack.callback(links.close)
        yield folder, links


def measure(folder: Path, point: Point, links: Links, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a point, whose files are gone afterwards."""
    own = folder / "states"
    own.mkdir()
    compute = Compute(point, args.width, args.link_gb_per_second)
    trainer = None
    try:
        trainer = Trainer(own, point, compute, args)
        return measured(point, trainer, compute, links, args)
    except zo.ZeroOffloadError as error:
        raise SystemExit(f"{point.name}: {error}") from error
    finally:
        if trainer is not None:
            trainer.close()
        compute.close()
        for file in sorted(own.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        own.rmdir()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; the result object."""
    points = SUITE if args.suite else (point_of(args),)
    if args.suite:
        points = tuple(replace(point, device=args.device) for point in points)
    rows: list[dict[str, Any]] = []
    with prepared(args, 28 * args.params + int(args.limit_gib * GIB)) as (folder, links):
        where = machine(folder)
        print(f"{where['device']} ({where['file_system']}), {where['usable_cores']} cores of {where['cpu']}")
        print(f"load average before: {where['load_average'][0]:.2f} (whatever else runs here takes from the figures)")
        heads = f"{'step s':>8}{'floor s':>8}{'compute':>9}{'sum s':>8}{'of floor':>9} [quartiles]    {'of sum':>8}"
        print(f"\n{'':44}{heads}  the floor's bound")
        for point in points:
            rows.append(measure(folder, point, links, args))
            show(rows[-1])
    print(f"{rows[0]['parameters']} parameters, {format_bytes(rows[0]['host_budget_bytes'])} of host memory at first")
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": versions(),
        "rows": rows,
        "checks": [item for row in rows for item in checks_of(row)],
    }


def point_of(args: argparse.Namespace) -> Point:
    """The one that the command line names."""
    return Point(
        placement=args.placement,
        update=args.update,
        compute_ratio=args.compute_ratio,
        accumulation=args.accumulation,
        micro_batches=args.micro_batches,
        clip=args.clip,
        device=args.device,
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--suite", action="store_true", help="all points that have a target")
    parser.add_argument("--placement", choices=PLACEMENTS, default="all-nvme")
    parser.add_argument("--update", choices=("auto", *(name.value for name in UpdateMode)), default="auto")
    parser.add_argument("--compute-ratio", type=positive, default=1.0, help="of compute to the slowest link")
    parser.add_argument("--accumulation", type=count, default=1, help="backwards a step")
    parser.add_argument("--micro-batches", type=count, default=1, help="slices of the batch inside each block")
    parser.add_argument("--activation-memory", type=count, default=256 * MIB, help="bytes for inputs of sliced blocks")
    parser.add_argument("--clip", choices=("never", "sometimes", "always"), default="never", help="when clipping fires")
    parser.add_argument("--device", choices=("simulated", "cpu", "cuda"), default="simulated")
    parser.add_argument("--params", type=count, default=200_000_000, help="200e6 if nothing is said")
    parser.add_argument("--width", type=count, default=2048, help="of a block's two square weights; 2048")
    parser.add_argument("--window-units", type=count, default=6, help="blocks that the device has room for; 6")
    parser.add_argument("--steps", type=count, default=4, help="timed in each round; 4")
    parser.add_argument("--rounds", type=count, default=5, help="5")
    parser.add_argument("--warm-up", type=count, default=NUM_WARM_UP_STEPS, help="steps before; 5")
    parser.add_argument("--host-memory", type=count, help="bytes; default: the least, and room for second places")
    parser.add_argument(
        "--link-gb-per-second",
        type=float,
        default=LINK_GB_PER_SECOND,
        metavar="N",
        help=f"of simulated copies in each direction; {LINK_GB_PER_SECOND:g}. 0: what a core can copy",
    )
    parser.add_argument("--threads", type=count, help="of the kernel")
    parser.add_argument("--engine", choices=("auto", "uring", "threads", "aiofiles"), default="auto")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a timeline of the timed steps, for Perfetto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--limit-gib", type=positive, default=4.0, help="file that the limit is measured on; 4")
    parser.add_argument("--grid-seconds", type=positive, default=GRID_SECONDS, help="of each setting of the limit; 0.5")
    parser.add_argument("--disk-turn-seconds", type=positive, default=DISK_TURN_SECONDS, help="of the limit; 1")
    parser.add_argument("--probe-numel", type=count, default=PROBE_NUMEL, help="elements of arrays in memory; 2**24")
    return parser.parse_args()


def main() -> None:
    """Run and report."""
    args = arguments()
    result = run(args)
    tell(result, args.json)
    refuse_wrong_bytes(result["checks"])


if __name__ == "__main__":
    main()
