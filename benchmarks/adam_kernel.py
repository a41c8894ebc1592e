"""How near the optimizer's kernels come to what memory allows, and how torch's own optimizers do on the same machine.

The limit is a loop that reads and writes exactly the bytes that the kernel must, and computes nothing: the fastest of a
few, which differ in how long they stay with one array. Of a group of contenders each runs once in every repetition, in
rotating order. Ratios are medians over the repetitions; above 1 is better for us. Before anything is timed, the first
elements are compared with the reference, bit for bit.

    python benchmarks/adam_kernel.py --json adam_kernel.json --plot adam_kernel.svg
    python benchmarks/adam_kernel.py --quick --threads 2 --target avx2

Arrays of zerooffload ask for huge pages and begin on a page, each moved on by another multiple of 576 bytes: where all
begin at a multiple of a power of two they displace each other in the caches. The peers' arrays lie where torch puts
them, and ask for huge pages too unless THP_MEM_ALLOC_ENABLE=0 is set. Peers keep gradient and moments in the
parameter's format; those of bf16 parameters have no master, so that they do less.

Prints two tables and the checks; with `--json` writes one object: machine, versions, rows with all repetitions, and
checks. A missed target does not change the exit status.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from plot_bars import Bar, bar_chart

import zerooffload as zo
from zerooffload import native
from zerooffload.accelerator.pages import PAGE_BYTES, populated_pages
from zerooffload.machine.cores import usable_cores
from zerooffload.optim.kernels import NativeKernels, TorchKernels
from zerooffload.optim.record import MomentFormat, OptimizerStates
from zerooffload.optim.rules import RULES, StepScalars
from zerooffload.optim.rules.rule import step_scalars
from zerooffload.runtime.clipping import clip_factor

if TYPE_CHECKING:
    from zerooffload._native import ThreadPool

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPE_NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "initial_accumulator_value": 0.0,
    "lr_decay": 0.0,
}
MAX_NORM = 1.0
JOB_TARGET = 0.9
CHECKED_NUMEL = 2**16
# Elements of the random numbers that all arrays repeat.
PATTERN_NUMEL = 2**17
STAGGER_BYTES, NUM_STAGGERS = 576, 7
# Threads of OpenMP look for more work for some milliseconds before they sleep, on the cores of who comes next.
PAUSE_SECONDS = 0.02

Contenders = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Configuration:
    """What is stepped, and how it is kept."""

    rule: str
    param: torch.dtype = FP32
    grad: torch.dtype = FP32
    moments: MomentFormat = "fp32"
    target: float | None = None
    """Of the ratio to the limit."""

    @property
    def name(self) -> str:
        """Rule, then the formats of parameter, gradient and moments."""
        return f"{self.rule} {DTYPE_NAMES[self.param]}/{DTYPE_NAMES[self.grad]}/{self.moments}"


CONFIGURATIONS = (
    Configuration("adamw", target=0.95),
    Configuration("adamw", FP32, BF16, target=0.95),
    Configuration("adamw", BF16, BF16, target=0.95),
    Configuration("adamw", BF16, FP32, target=0.95),
    Configuration("adamw", FP16, FP16, target=0.95),
    Configuration("adamw", FP32, FP32, "bf16", target=0.9),
    Configuration("adamw", BF16, BF16, "bf16", target=0.9),
    Configuration("adamw", FP32, FP32, "8bit", target=0.85),
    Configuration("adamw", BF16, BF16, "8bit", target=0.85),
    Configuration("lion"),
    Configuration("sgd"),
    Configuration("adagrad"),
    Configuration("adam"),
)


class Memory:
    """Gives out arrays that do not displace each other in the caches."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._given = 0
        generator = torch.Generator().manual_seed(0)
        self._pattern = torch.randn(PATTERN_NUMEL, generator=generator)

    def array(self, dtype: torch.dtype, num_items: int | None = None) -> torch.Tensor:
        """Zeros, of `numel` items where nothing else is said, all touched."""
        nbytes = (self.numel if num_items is None else num_items) * dtype.itemsize
        offset = self._given % NUM_STAGGERS * STAGGER_BYTES
        self._given += 1
        return populated_pages(nbytes + PAGE_BYTES)[offset : offset + nbytes].zero_().view(dtype)

    def random(self, dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers."""
        return self.scatter(self.array(dtype))

    def scatter(self, array: torch.Tensor) -> torch.Tensor:
        """Fill with normal numbers."""
        array.view(-1, PATTERN_NUMEL).copy_(self._pattern)
        return array


@dataclass(frozen=True)
class Stream:
    """An array of a pass."""

    tensor: torch.Tensor
    written: bool


class Traffic:
    """The bytes of passes over arrays, moved with nothing computed."""

    def __init__(self, pool: ThreadPool, passes: Sequence[Sequence[Stream]]) -> None:
        self._pool = pool
        self._passes = passes

    def variants(self, name: str) -> Contenders:
        """The same bytes in tiles of several lengths. One call stays with an array for 1024 items."""
        smallest = min(stream.tensor.element_size() for streams in self._passes for stream in streams)
        shapes = {f"{name}, shortest tiles": (1, smallest), f"{name}, tiles": (1, 1), f"{name}, long tiles": (8, 1)}
        if smallest == 1:
            del shapes[f"{name}, shortest tiles"]
        return {label: self._mover(*shape) for label, shape in shapes.items()}

    def _mover(self, times: int, parts: int) -> Callable[[], None]:
        """Taking `times` items as one, or one as `parts`."""
        calls = []
        for streams in self._passes:
            numel = streams[0].tensor.numel() * parts // times
            items = [(s.tensor.data_ptr(), s.tensor.element_size() * times // parts, s.written) for s in streams]
            calls.append((items, numel))

        def move() -> None:
            for items, numel in calls:
                native.module.move_traffic(self._pool, items, numel)

        return move


class OurStep:
    """The arrays of a configuration, and its kernel on them."""

    def __init__(self, configuration: Configuration, memory: Memory, kernels: NativeKernels) -> None:
        self.configuration = configuration
        self.kernels = kernels
        self.rule = RULES[configuration.rule]
        self.param = memory.random(configuration.param)
        self.grad = memory.random(configuration.grad)
        parts = OptimizerStates(configuration.rule, configuration.moments).parts(configuration.param)
        self.record = {part.name: memory.array(part.dtype, part.num_items(memory.numel)) for part in parts}
        if "master" in self.record:
            memory.scatter(self.record["master"])
        self._scalars = self.scalars(3, 1.0)

    def scalars(self, step: int, grad_factor: float) -> StepScalars:
        """Of one step."""
        return step_scalars(self.rule, GROUP, step, grad_factor)

    def __call__(self) -> None:
        """One step."""
        self.step(self._scalars)

    def step(self, scalars: StepScalars) -> None:
        """One step, with these scalars."""
        self.kernels.step(scalars, self.param, self.record, self.grad, 0)

    @property
    def bytes_per_param(self) -> float:
        """That the step must move for each: all are read and written, but gradients and copies of masters."""
        moved = self.grad.nbytes + sum(2 * array.nbytes for array in self.record.values())
        moved += self.param.nbytes * (1 if self.configuration.param is FP16 else 2)
        return moved / self.param.numel()

    def passes(self) -> list[list[Stream]]:
        """The same as traffic. A read stands for a write without a read, of which the traffic loop has none.

        The scales of 8-bit moments, of another length, come as a second, tiny pass.
        """
        numel = self.param.numel()
        arrays = [Stream(self.grad, written=False), Stream(self.param, written=self.configuration.param is not FP16)]
        arrays += [Stream(array, written=True) for array in self.record.values()]
        whole = [stream for stream in arrays if stream.tensor.numel() == numel]
        scales = [stream for stream in arrays if stream.tensor.numel() != numel]
        return [whole, scales] if scales else [whole]

    def verify(self) -> None:
        """Make two steps, and compare the first elements with the reference's.

        Raises
        ------
        RuntimeError
            If a bit differs.
        """
        ours = {"param": self.param, "grad": self.grad, **self.record}
        numel = self.param.numel()
        firsts = {name: array[: CHECKED_NUMEL * array.numel() // numel] for name, array in ours.items()}
        expected = {name: array.clone() for name, array in firsts.items()}
        record = {name: expected[name] for name in self.record}
        for step in (1, 2):
            scalars = self.scalars(step, 0.5)
            self.step(scalars)
            TorchKernels().step(scalars, expected["param"], record, expected["grad"], 0)
        for name, array in firsts.items():
            require_equal(f"{self.configuration.name}: {name}", array, expected[name])


def require_equal(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError if a bit differs."""
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise RuntimeError(f"{what} differs from the reference: nothing was timed")


# --- peers


TORCH_OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.01}),
}
# Name, module, class, arguments, and the moments for which it keeps the same.
OTHER_OPTIMIZERS: tuple[tuple[str, str, str, dict[str, Any], MomentFormat], ...] = (
    ("DeepSpeed CPUAdam", "deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}, "fp32"),
    ("torchao AdamW8bit", "torchao.optim", "AdamW8bit", {}, "8bit"),
    ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit", {}, "8bit"),
)


def torch_random(memory: Memory, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, in memory of torch's own."""
    return memory.scatter(torch.empty(memory.numel, dtype=dtype))


def torch_param(memory: Memory, dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter with a gradient, in memory of torch's own."""
    param = torch.nn.Parameter(torch_random(memory, dtype))
    param.grad = torch_random(memory, dtype)
    return param


def peers_of(configuration: Configuration, memory: Memory) -> tuple[Contenders, dict[str, str]]:
    """Optimizers that do the same on as many elements, and why others are missing."""
    peers: Contenders = {}
    missing: dict[str, str] = {}
    if configuration.rule not in TORCH_OPTIMIZERS:
        return peers, {"torch": f"has no {configuration.rule}"}
    optimizer, options = TORCH_OPTIMIZERS[configuration.rule]
    for dtype in dict.fromkeys((FP32, configuration.param)):
        if dtype is FP16:  # torch's steps of fp16 parameters keep fp16 moments, with which no one trains
            continue
        param = torch_param(memory, dtype)
        for way in ("fused", "foreach"):
            peers[f"torch {way} {DTYPE_NAMES[dtype]}"] = optimizer([param], lr=1e-3, **options, **{way: True}).step
    if configuration.rule == "adamw" and configuration.param is FP32:
        add_others(configuration, memory, peers, missing)
    return peers, missing


def add_others(configuration: Configuration, memory: Memory, peers: Contenders, missing: dict[str, str]) -> None:
    """Optimizers of other packages, where they are installed and work here."""
    for name, module, attribute, options, moments in OTHER_OPTIMIZERS:
        if configuration.moments != moments:
            continue
        try:
            step = getattr(importlib.import_module(module), attribute)(
                [torch_param(memory, FP32)], lr=1e-3, weight_decay=0.01, **options
            ).step
            step()
        except ModuleNotFoundError:
            missing[name] = "not installed"
        except Exception as error:  # noqa: BLE001 - whatever it raises, it cannot be timed here
            missing[name] = f"does not run here: {type(error).__name__}: {error}"
        else:
            peers[name] = step


# --- measuring


def measured(contenders: Contenders, repeats: int) -> Seconds:
    """Seconds of each, once a repetition, in rotating order; the first calls do not count."""
    for contender in contenders.values():
        contender()
    names = list(contenders)
    seconds: Seconds = {name: [] for name in names}
    for repetition in range(repeats):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE_SECONDS)
            begin = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"low": values[0], "median": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def ratio(seconds: Seconds, other: str, ours: str) -> dict[str, float]:
    """How many times as fast we are as another, repetition by repetition."""
    return quartiles([theirs / own for theirs, own in zip(seconds[other], seconds[ours], strict=True)])


def fastest(seconds: Seconds, names: Sequence[str]) -> str:
    """Who has the smallest median."""
    return min(names, key=lambda name: statistics.median(seconds[name]))


def row_of(
    ours: str, numel: int, bytes_per_param: float, seconds: Seconds, roles: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """A row of a table: `roles` names the traffic loops and the peers among the contenders."""
    limit = fastest(seconds, roles["limits"])
    times = quartiles(seconds[ours])
    return {
        "name": ours,
        "numel": numel,
        "bytes_per_param": bytes_per_param,
        "gparam_per_second": numel / times["median"] / 1e9,
        "gb_per_second": numel * bytes_per_param / times["median"] / 1e9,
        "seconds_quartiles": times,
        "limit": limit,
        "ratio_to_limit": ratio(seconds, limit, ours),
        "ratio_to_peers": {name: ratio(seconds, name, ours) for name in roles["peers"]},
        "missing_peers": {},
        "seconds": {name: seconds[name] for name in (ours, *roles["limits"], *roles["peers"])},
    }


def huge_bytes() -> int:
    """Of this process, on huge pages; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


# --- table 1: the step alone


FP32_MOMENTS = "the same with fp32 moments"


class Bench:
    """What all measurements share."""

    def __init__(self, numel: int, threads: int, repeats: int) -> None:
        self.memory = Memory(numel)
        self.kernels = NativeKernels(threads)
        self.pool = native.module.ThreadPool(threads)
        self.repeats = repeats

    def step_row(self, configuration: Configuration) -> dict[str, Any]:
        """The row of a configuration."""
        before = huge_bytes()
        ours = OurStep(configuration, self.memory, self.kernels)
        on_huge_pages = huge_bytes() - before
        ours.verify()
        limits = Traffic(self.pool, ours.passes()).variants("traffic")
        peers, missing = peers_of(configuration, self.memory)
        if configuration.moments != "fp32":
            peers[FP32_MOMENTS] = OurStep(replace(configuration, moments="fp32"), self.memory, self.kernels)
        seconds = measured({configuration.name: ours, **limits, **peers}, self.repeats)
        roles = {"limits": list(limits), "peers": list(peers)}
        row = row_of(configuration.name, self.memory.numel, ours.bytes_per_param, seconds, roles)
        arrays = (ours.param, ours.grad, *ours.record.values())
        row |= {"table": "step", "target": configuration.target, "missing_peers": missing}
        row["huge_page_share"] = min(1.0, on_huge_pages / sum(array.nbytes for array in arrays))
        return row

    def job_rows(self) -> list[dict[str, Any]]:
        """The rows of the whole job and of its first sweep."""
        ours, peer = OurJob(self), TorchJob(self.memory)
        ours.verify()
        arrival = [Stream(ours.source, written=False), Stream(ours.total, written=True)]
        update = ours.update.passes()
        sweeps = {
            "accumulate": Traffic(self.pool, [arrival]).variants("traffic of accumulating"),
            "update": Traffic(self.pool, update).variants("traffic of the step"),
            "job": Traffic(self.pool, [arrival, *update]).variants("traffic of both sweeps"),
        }
        first, whole = "accumulate with norm", "whole job"
        firsts: Contenders = {ACCUMULATE_SEPARATE: peer.accumulate_separately, ACCUMULATE_FEWEST: peer.accumulate}
        wholes: Contenders = {JOB_SEPARATE: peer.separately, JOB_FEWEST: peer.with_fewest_passes}
        loops = sweeps["accumulate"] | sweeps["update"] | sweeps["job"]
        all_ours: Contenders = {first: ours.accumulate, whole: ours}
        seconds = measured(all_ours | loops | firsts | wholes, self.repeats)
        first_bytes = ours.source.element_size() + 2 * ours.total.element_size()
        rows = []
        for name, nbytes, limits, peers, target in (
            (first, first_bytes, sweeps["accumulate"], firsts, None),
            (whole, first_bytes + ours.update.bytes_per_param, sweeps["job"], wholes, JOB_TARGET),
        ):
            roles = {"limits": list(limits), "peers": list(peers)}
            rows.append(row_of(name, self.memory.numel, nbytes, seconds, roles) | {"table": "job", "target": target})
        sweep = fastest(seconds, list(sweeps["update"]))
        rows[1]["sweeps"] = quartiles([o / s for o, s in zip(seconds[whole], seconds[sweep], strict=True)])
        rows[1]["seconds"][sweep] = seconds[sweep]
        return rows


# --- table 2: from a bf16 gradient to a bf16 parameter


ACCUMULATE_SEPARATE = "torch: add_, isfinite, norm"
ACCUMULATE_FEWEST = "torch: add_, norm"
JOB_SEPARATE = "torch: add_, isfinite, norm, mul_, fused AdamW, copy_"
JOB_FEWEST = "torch: add_, norm, fused AdamW that clips, copy_"


class OurJob:
    """Add a bf16 gradient to an fp32 sum, clip by the norm, and step the fp32 master of a bf16 parameter."""

    def __init__(self, bench: Bench) -> None:
        self.source = bench.memory.random(BF16)
        self.update = OurStep(Configuration("adamw", BF16, FP32), bench.memory, bench.kernels)
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


# --- checks


def check(name: str, value: float, target: float, better: str = "higher") -> dict[str, Any]:
    """A figure and its target, which itself is good enough."""
    ok = value >= target if better == "higher" else value <= target
    return {"name": name, "value": value, "target": target, "better": better, "ok": ok}


def step_checks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the first table."""
    checks = []
    for row in rows:
        peers = {name: numbers["median"] for name, numbers in row["ratio_to_peers"].items()}
        if row["target"] is not None:
            checks.append(check(f"{row['name']}: of its limit", row["ratio_to_limit"]["median"], row["target"]))
        if row["name"] == CONFIGURATIONS[0].name:
            nearest = fastest(row["seconds"], list(peers))
            checks.append(check(f"{row['name']}: times {nearest}, its fastest peer", peers[nearest], 0.98))
        if FP32_MOMENTS in peers:
            # As fast is not faster.
            faster = check(f"{row['name']}: times {FP32_MOMENTS}", peers[FP32_MOMENTS], 1.0)
            checks.append(faster | {"ok": peers[FP32_MOMENTS] > 1.0})
    return checks


def job_checks(first: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the second table."""
    nearest = fastest(whole["seconds"], list(whole["ratio_to_peers"]))
    return [
        check(
            f"{first['name']}: times {ACCUMULATE_SEPARATE}", first["ratio_to_peers"][ACCUMULATE_SEPARATE]["median"], 4.0
        ),
        check("whole job: sweeps, of the step's traffic", whole["sweeps"]["median"], 2.0, "lower"),
        check("whole job: of its limit", whole["ratio_to_limit"]["median"], JOB_TARGET),
        check(f"whole job: times {nearest}, the fastest sequence", whole["ratio_to_peers"][nearest]["median"], 2.0),
    ]


# --- reporting


def machine(threads: int) -> dict[str, Any]:
    """Where this runs."""
    setting, cpus = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "platform": platform.platform(),
        "cpu": models[0] if models else platform.processor(),
        "cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "transparent_huge_pages": setting.read_text().strip() if setting.exists() else "unknown",
        "torch_huge_pages": os.environ["THP_MEM_ALLOC_ENABLE"] == "1",
        "load_average": list(psutil.getloadavg()),
        "target": native.module.active_target(),
        "threads": threads,
    }


def versions() -> dict[str, str]:
    """Of everything that takes part, as far as it is installed."""
    found = {"zerooffload": zo.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("deepspeed", "torchao", "bitsandbytes"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def show(row: dict[str, Any]) -> None:
    """Print a row, and its peers under it."""
    limit = row["ratio_to_limit"]
    print(
        f"{row['name']:24}{row['gparam_per_second']:9.3f}{row['bytes_per_param']:9.2f}{row['gb_per_second']:8.1f}"
        f"{limit['median']:9.3f} [{limit['low']:.3f}, {limit['high']:.3f}]"
    )
    for name, numbers in row["ratio_to_peers"].items():
        print(f"    {numbers['median']:6.2f} [{numbers['low']:.2f}, {numbers['high']:.2f}] times {name}")
    for name, reason in row["missing_peers"].items():
        print(f"    {name}: {reason}")
    if "sweeps" in row:
        print(f"    {row['sweeps']['median']:6.2f} sweeps, of the step's traffic")
    sys.stdout.flush()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Verify, measure and print the tables; the result object."""
    bench = Bench(args.numel, args.threads, args.repeats)
    where = machine(args.threads)
    pages = "and torch's too" if where["torch_huge_pages"] else "but torch's do not"
    print(f"{args.numel} parameters, {args.repeats} repetitions, {bench.kernels.name} on {where['cpu']}")
    print(f"load average before: {where['load_average'][0]:.2f} (anything else that runs here takes from the figures)")
    print(f"huge pages: our arrays ask for them, {pages}; the system says {where['transparent_huge_pages']}\n")
    heads = f"{'Gparam/s':>9}{'B/param':>9}{'GB/s':>8}  of limit [quartiles]"
    print(f"{'step':24}{heads}")
    steps = []
    for configuration in CONFIGURATIONS:
        steps.append(bench.step_row(configuration))
        show(steps[-1])
        gc.collect()
    print(f"\n{'from a bf16 gradient':24}{heads}")
    jobs = bench.job_rows()
    for row in jobs:
        show(row)
    share = statistics.median(row["huge_page_share"] for row in steps)
    print(f"\n{share:.0%} of our arrays' bytes lay on huge pages")
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": versions(),
        "numel": args.numel,
        "rows": [*steps, *jobs],
        "checks": [*step_checks(steps), *job_checks(*jobs)],
    }


def numel_of(text: str) -> int:
    """A number of elements: 134217728 or 2**27."""
    base, _, exponent = text.partition("**")
    numel = int(int(base) ** int(exponent or 1))
    if numel <= 0 or numel % PATTERN_NUMEL:
        raise argparse.ArgumentTypeError(f"expected a multiple of {PATTERN_NUMEL} elements, got {numel}")
    return numel


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=numel_of, help="parameters, 2**27 if nothing is said")
    parser.add_argument("--repeats", type=int, help="repetitions, 9 if nothing is said")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of the kernels and of torch")
    parser.add_argument("--target", choices=native.module.supported_targets() if native.available else [])
    parser.add_argument("--quick", action="store_true", help="2**22 parameters and 3 repetitions: a trial, no result")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="the ratios to the limit as a chart")
    args = parser.parse_args()
    args.numel = args.numel or (2**22 if args.quick else 2**27)
    args.repeats = args.repeats or (3 if args.quick else 9)
    return args


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """Each row's ratio to its limit, as SVG."""
    bars = []
    for row in rows:
        spread = row["ratio_to_limit"]
        bars.append(Bar(row["name"], spread["median"], spread["low"], spread["high"], row["target"]))
    return bar_chart("Speed, as a share of what memory traffic alone allows", bars)


def main() -> None:
    """Run and report."""
    # Read by torch at its first large allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not native.available:
        raise SystemExit(f"there are no native kernels to time: {native.why_unavailable}")
    args = arguments()
    if args.target:
        native.module.set_target(args.target)
    torch.set_num_threads(args.threads)
    result = run(args)
    print()
    for item in result["checks"]:
        verdict = "ok" if item["ok"] else "MISSED"
        print(f"{verdict:7}{item['name']}: {item['value']:.3f} ({item['better']} than {item['target']} is wanted)")
    missed = [item["name"] for item in result["checks"] if not item["ok"]]
    print(f"\n{len(missed)} of {len(result['checks'])} targets missed{': ' if missed else ''}{'; '.join(missed)}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        args.plot.write_text(chart(result["rows"]))


if __name__ == "__main__":
    main()
