"""How near an optimizer step, whose states stream from and to the drive, comes to what moving their bytes takes.

AdamW over a model of a few large parameters whose states are larger than the host memory that the run may take. The
gradients are in host memory, filled once by a backward; then `optimizer.step()` is timed again and again, each time
until the step is committed, flushes included. The floor is the time that the step's bytes take at the limit: 12 written
and 12 read a parameter, but for the last chunks, which are still in host memory. The limit is a C loop that only
transfers (disk_limit.c, the better of threads and io_uring, each with the best of a few settings), measured before and
after each step at the same ratio of reads to writes.

    python benchmarks/optimizer_stream.py /mnt/nvme --json optimizer_stream.json
    python benchmarks/optimizer_stream.py /mnt/nvme --dtype bf16 --engine uring

Takes 36 bytes of space a parameter. A missed target does not change the exit status; bytes that are not those of the
formula do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import util
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from disk_limit import (
    DiskLimit,
    Mix,
    Setting,
    Turn,
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
from torch import nn

import zerooffload as zo
from zerooffload.accelerator import populated_pages
from zerooffload.formats import MIB, format_bytes, round_up
from zerooffload.planner.placement import CHUNK_NUMEL, NUM_STAGING_SLOTS
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import StepReport
from zerooffload.tiers import FILE_ALIGNMENT_BYTES
from zerooffload.tiers.checksums import checksum

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATE_BYTES = 12
"""A parameter's: parameter and two fp32 moments, or upper half, lower half and moments."""
MOST_PARAM_NUMEL = 2**26
PATTERN_NUMEL = 2**17
UPDATE = Mix("1:1", 1, 1)
MOST_RATIO = 1.08
NUM_WARM_UP_STEPS = 2
GRID_SECONDS = 1.0
MOST_TURN_SECONDS = 3.0
BYTES_TOLERANCE = 0.01


class Weights(nn.Module):
    """One parameter; its gradient is a repeated pattern of normal numbers."""

    def __init__(self, numel: int, pattern: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, dtype=pattern.dtype, device="meta"))
        self._pattern = pattern

    def reset_parameters(self) -> None:
        """Called when the values get their home."""
        nn.init.normal_(self.weight)

    def forward(self) -> torch.Tensor:
        """A weighted sum."""
        return (self.weight.view(-1, PATTERN_NUMEL) @ self._pattern).sum()


class Model(nn.Module):
    """About that many parameters, in a few modules."""

    def __init__(self, num_params: int, pattern: torch.Tensor) -> None:
        super().__init__()
        left = round_up(num_params, PATTERN_NUMEL)
        lengths = [MOST_PARAM_NUMEL] * (left // MOST_PARAM_NUMEL)
        lengths += [left % MOST_PARAM_NUMEL] if left % MOST_PARAM_NUMEL else []
        self.parts = nn.ModuleList(Weights(numel, pattern) for numel in lengths)

    def forward(self) -> torch.Tensor:
        """The sum of all."""
        return torch.stack([part() for part in self.parts]).sum()


@dataclass(frozen=True)
class Step:
    """One timed step."""

    seconds: float
    cpu_seconds: float
    read_bytes: int
    written_bytes: int
    report: StepReport


class Stepper:
    """An offloaded model with its gradients, and its optimizer."""

    def __init__(self, folder: Path, args: argparse.Namespace, *, atomic: bool) -> None:
        pattern = torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(0))
        self._model = Model(args.parameters, pattern.to(DTYPES[args.dtype]))
        self.num_params = sum(param.numel() for param in self._model.parameters())
        self.host_bytes = host_budget(self._model)
        config = zo.OffloadConfig(
            params="nvme",
            optimizer="nvme",
            gradients="host",
            nvme_paths=(folder,),
            host_memory=self.host_bytes,
            units=[Weights],
            update="after_backward",
            atomic_steps=atomic,
            io_engine=args.engine,
        )
        zo.offload(self._model, config)
        self._optimizer = zo.AdamW(self._model.parameters(), lr=1e-4)
        self._model().backward()

    @property
    def cached_bytes(self) -> int:
        """What a step need not read, because the staging ring holds it since the step before."""
        ring = self._run()._resources.ring
        return int(ring.num_slots * ring.buffers[0].numel())

    @property
    def engine(self) -> str:
        """Which one moves the bytes."""
        return str(self._run()._resources.nvme.engine.name)

    def step(self) -> Step:
        """Step, and wait until that is committed. Gradients stay what they are."""
        read, written = process_io()
        start, cpu = time.perf_counter(), time.process_time()
        self._optimizer.step()
        commits = self._run()._resources.commits
        if commits is not None:
            # A training loop does this before its next step begins to write; only the benchmark wants it at once.
            commits.settle()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        read_after, written_after = process_io()
        return Step(seconds, cpu_seconds, read_after - read, written_after - written, zo.step_report(self._model))

    def close(self) -> None:
        """End the run."""
        zo.close(self._model)

    def _run(self) -> Any:
        residence = residence_of(next(self._model.parameters()))
        if residence is None:
            raise RuntimeError("the model is not offloaded")
        return residence.run


def host_budget(model: nn.Module) -> int:
    """The least that such a run needs: gradients, one module's parameters, the staging ring, and the journal."""
    params = list(model.parameters())
    itemsize = params[0].element_size()
    longest = max(param.numel() for param in params)
    ring = NUM_STAGING_SLOTS * STATE_BYTES * min(CHUNK_NUMEL, longest)
    return itemsize * (sum(param.numel() for param in params) + longest) + ring + 2 * MIB


def process_io() -> tuple[int, int]:
    """Bytes that this process has caused to be read from and written to drives."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def checksum_rate() -> float:
    """Bytes a second."""
    memory = populated_pages(24 * MIB)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        checksum(memory)
        seconds.append(time.perf_counter() - start)
    return memory.numel() / statistics.median(seconds)


def interleaved(
    stepper: Stepper, limit: DiskLimit, settings: Iterable[Setting], num_steps: int
) -> tuple[list[Step], dict[Setting, list[Turn]]]:
    """Steps, and for each setting a turn before the first and after each."""
    for _ in range(NUM_WARM_UP_STEPS):
        last = stepper.step()
    turn_seconds = min(last.seconds, MOST_TURN_SECONDS)
    turns: dict[Setting, list[Turn]] = {setting: [limit.turn(setting, UPDATE, turn_seconds)] for setting in settings}
    steps = []
    for number in range(num_steps):
        print(f"step {number + 1} of {num_steps}", file=sys.stderr)
        steps.append(stepper.step())
        for setting, done in turns.items():
            done.append(limit.turn(setting, UPDATE, turn_seconds))
    return steps, turns


def row_of(
    name: str, stepper: Stepper, steps: list[Step], turns: dict[Setting, list[Turn]], args: argparse.Namespace
) -> dict[str, Any]:
    """What one kind of step took, beside its floor."""
    setting = max(turns, key=lambda one: statistics.median(turn.bytes_per_second for turn in turns[one]))
    rates = [turn.bytes_per_second for turn in turns[setting]]
    around = [statistics.mean(pair) for pair in pairwise(rates)]
    expected = STATE_BYTES * stepper.num_params
    read = expected - stepper.cached_bytes
    floors = [(read + expected) / rate for rate in around]
    waits = {cause for step in steps for cause in step.report.waits}
    return {
        "name": f"{name} {args.dtype} {stepper.engine}",
        "parameters": stepper.num_params,
        "state_bytes": expected,
        "expected_bytes": {"read": read, "written": expected},
        "host_budget_bytes": stepper.host_bytes,
        "engine": stepper.engine,
        "limit": str(setting),
        "limit_gb_per_second": spread([rate / 1e9 for rate in rates]),
        "floor_seconds": spread(floors),
        "step_seconds": spread([step.seconds for step in steps]),
        "ratio_to_floor": spread([step.seconds / floor for step, floor in zip(steps, floors, strict=True)]),
        "cpu_seconds": spread([step.cpu_seconds for step in steps]),
        "kernel_seconds": spread([step.report.work.get("update kernel", 0.0) for step in steps]),
        "checksum_seconds": 0.0 if name == "in place" else expected / checksum_rate(),
        "wait_seconds": {
            cause: statistics.median(step.report.waits.get(cause, 0.0) for step in steps) for cause in sorted(waits)
        },
        "read_bytes": statistics.median(step.read_bytes for step in steps),
        "written_bytes": statistics.median(step.written_bytes for step in steps),
        "repetitions": [
            {"seconds": step.seconds, "floor_seconds": floor, "cpu_seconds": step.cpu_seconds}
            for step, floor in zip(steps, floors, strict=True)
        ],
    }


def measure(
    name: str, folder: Path, limit: DiskLimit, settings: list[Setting], args: argparse.Namespace
) -> dict[str, Any]:
    """The row of one kind of step."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    try:
        stepper = Stepper(own, args, atomic=name == "atomic")
    except zo.ZeroOffloadError as error:
        raise SystemExit(f"{name}: {error}") from error
    try:
        steps, turns = interleaved(stepper, limit, settings, args.steps)
        return row_of(name, stepper, steps, turns, args)
    finally:
        stepper.close()
        # The files of a committed run stay: make room for the next.
        for file in own.rglob("*.bin"):
            file.unlink()


def checks_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's figures that are aimed at."""
    name = row["name"]
    checks = [check(f"{name}: step time, of the floor", row["ratio_to_floor"]["median"], MOST_RATIO, "lower")]
    for what in ("read", "written"):
        off = abs(row[f"{what}_bytes"] / row["expected_bytes"][what] - 1)
        checks.append(check(f"{name}: bytes {what}, off the formula", off, BYTES_TOLERANCE, "lower"))
    return checks


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    step, floor, ratio = row["step_seconds"], row["floor_seconds"], row["ratio_to_floor"]
    print(
        f"{row['name']:24}{step['median']:8.3f}{floor['median']:8.3f}"
        f"{ratio['median']:8.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        f"{row['limit_gb_per_second']['median']:8.2f}"
        f"{row['read_bytes'] / row['parameters']:8.2f}{row['written_bytes'] / row['parameters']:8.2f}"
        f"{row['cpu_seconds']['median']:8.2f}{row['kernel_seconds']['median']:8.2f}{row['checksum_seconds']:8.2f}"
    )
    waits = ", ".join(f"{cause} {seconds:.3f} s" for cause, seconds in row["wait_seconds"].items())
    print(f"    the limit: {row['limit']}; waited for {waits}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Lay out the files, measure and print; the result object."""
    state_bytes = STATE_BYTES * round_up(args.parameters, PATTERN_NUMEL)
    with scratch_folder(args.path, 3 * state_bytes) as folder:
        where = machine(folder)
        file_bytes = round_up(state_bytes, FILE_ALIGNMENT_BYTES)
        lay_out(folder / "limit.bin", file_bytes)
        limit = DiskLimit(folder, folder / "limit.bin", file_bytes)
        settings = limit.finalists([UPDATE], args.grid_seconds)[UPDATE]
        rows = [measure(name, folder, limit, settings, args) for name in ("atomic", "in place")]
    missing = {f"limit {name}": why for name, why in limit.why_missing.items()}
    if util.find_spec("deepspeed") is None:
        missing["DeepSpeed's optimizer swapper"] = "deepspeed is not installed"
    else:
        missing["DeepSpeed's optimizer swapper"] = "installed, but this benchmark does not know how to run it"
    print(f"{where['device']} ({where['file_system']}), {where['usable_cores']} cores of {where['cpu']}")
    print(f"load average before: {where['load_average'][0]:.2f} (whatever else runs here takes from the figures)")
    first = rows[0]
    print(
        f"{first['parameters']} parameters, {format_bytes(first['state_bytes'])} of states,"
        f" {format_bytes(first['host_budget_bytes'])} of host memory"
    )
    if first["host_budget_bytes"] >= first["state_bytes"]:
        print("that is no state larger than the host's budget: ask for more parameters")
    print(
        f"\n{'':24}{'step s':>8}{'floor s':>8}{'ratio':>8} [quartiles]   {'GB/s':>8}{'B/p in':>8}{'B/p out':>8}"
        f"{'CPU s':>8}{'kernel':>8}{'checksum':>9}"
    )
    for row in rows:
        show(row)
    for name, why in missing.items():
        print(f"{name}: missing, {why}")
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": versions("deepspeed"),
        "missing": missing,
        "limit_huge_page_share": limit.huge_page_share,
        "limit_buffers_registered": limit.is_registered,
        "rows": rows,
        "checks": [item for row in rows for item in checks_of(row)],
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--parameters", type=count, default=600_000_000, help="600e6 if nothing is said")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the parameters")
    parser.add_argument("--steps", type=count, default=9, help="that are timed; 9")
    parser.add_argument("--engine", choices=("auto", "uring", "threads", "aiofiles"), default="auto")
    parser.add_argument("--grid-seconds", type=positive, default=GRID_SECONDS, help="of each setting of the limit; 1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Run and report."""
    args = arguments()
    result = run(args)
    tell(result, args.json)
    refuse_wrong_bytes(result["checks"])


if __name__ == "__main__":
    main()
