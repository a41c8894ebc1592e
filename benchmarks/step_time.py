"""A step of a Llama of 125 M parameters on the CPU: ours beside plain PyTorch, FSDP2 and DeepSpeed.

Each contestant trains in a process of its own, from the same weights on the same batches, fp32, with clipping. They
take turns: in each round each makes a step while the others wait, in rotating order, and the drive is measured once (by
disk_limit.c). Losses are shown side by side. A peer that is not installed, or does not run here, is a row that says so;
`--peers-python` names the interpreter of another environment, for DeepSpeed.

    python benchmarks/step_time.py /mnt/nvme --json step_time.json
    python benchmarks/step_time.py /mnt/nvme --peers-python ~/venv-peers/bin/python

Beside each ratio stands what is expected by counting passes over memory (`TRAFFIC_BYTES`). A missed target does not
change the exit status.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_limit import (
    DiskLimit,
    Mix,
    Setting,
    check,
    count,
    lay_out,
    machine,
    positive,
    scratch_folder,
    spread,
    tell,
    versions,
)
from floors import Demand, mix_of
from kernel_arrays import Configuration, Memory, OurStep, Traffic

from zerooffload.formats import GIB, MIB, format_bytes
from zerooffload.machine.cores import usable_cores
from zerooffload.optim.kernels import NativeKernels, host_kernels

WORKER = Path(__file__).with_name("step_contestants.py")
PLAIN, ALL_HOST, ALL_NVME = "plain", "all-host", "all-nvme"
CONTESTANTS = {
    PLAIN: "PyTorch, fused AdamW",
    ALL_HOST: "zerooffload, all on host",
    ALL_NVME: "zerooffload, all on nvme",
    "fsdp2": "FSDP2, CPU offload",
    "deepspeed": "DeepSpeed ZeRO 3, CPU offload",
}
TRAFFIC_BYTES = {
    # The update's 28, and to norm (4) and to scale (8) a gradient.
    PLAIN: 40,
    # The gradient goes home (8) and is normed there (4); the update scales it.
    ALL_HOST: 40,
    # It gathers (8) and is normed (4); states come and go by direct I/O.
    ALL_NVME: 40,
    # Parameters are gathered twice, through a buffer (16 each); gradients are copied in and reduced (16).
    "fsdp2": 40 + 32 + 16,
    # The same gathers; gradients go through a bucket to an fp32 buffer (16).
    "deepspeed": 40 + 32 + 16,
}
"""Of memory traffic outside of the model's own compute, for each parameter."""
MOST_OF_PLAIN, MOST_OF_MAXIMUM, MOST_NVME_BYTES = 1.05, 1.15, 1_300_000_000
MOST_LOSS_DIFFERENCE = 1e-3
STATE_BYTES = 16
PROBE_NUMEL = 2**24


@dataclass(frozen=True)
class Shape:
    """A batch."""

    sequences: int
    length: int

    @property
    def name(self) -> str:
        """As a product."""
        return f"{self.sequences} x {self.length} tokens"

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.sequences * self.length


SHAPES = (Shape(4, 256), Shape(2, 256))


class Process:
    """A contestant's process.

    Attributes
    ----------
    missing : str
        Why it takes no part; "" if it does.
    """

    def __init__(self, name: str, shape: Shape, folder: Path, args: argparse.Namespace) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.end: dict[str, Any] = {}
        own = folder / name
        own.mkdir(exist_ok=True)
        sizes = {"layers": args.layers, "hidden": args.hidden, "vocab": args.vocab, "threads": args.threads}
        sizes |= {"sequences": shape.sequences, "length": shape.length}
        words = [word for option, value in sizes.items() for word in (f"--{option}", str(value))]
        words += ["--nvme", str(own), "--host-memory", args.host_memory]
        python = args.peers_python if name == "deepspeed" and args.peers_python else sys.executable
        self._errors = (folder / f"{name}.err").open("w+")
        self._process: subprocess.Popen[str] | None = None
        self.missing = ""
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this benchmark's other half
                [python, str(WORKER), name, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self.missing = str(error)
        else:
            self.missing = str(self._answer().get("missing", self.missing))

    def steps(self, number: int, *, num_timed: int) -> None:
        """Let it make so many steps; the last ones count."""
        answer = self._ask(f"{number}\n")
        self.losses += answer.get("losses", [])
        self.seconds += answer.get("seconds", [])[number - num_timed :]

    def finish(self) -> None:
        """Let it end, and tell what it has to tell."""
        if self._process is not None and self._process.stdin is not None and not self.missing:
            self._process.stdin.close()
            self.end = self._answer()
            self._process.wait()

    def close(self) -> None:
        """End it, however it is."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ask(self, line: str) -> dict[str, Any]:
        if self.missing or self._process is None or self._process.stdin is None:
            return {}
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout if self._process is not None else None
        if stdout is not None and (line := stdout.readline()):
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._errors.seek(0)
        last = [line.strip() for line in self._errors if line.strip()][-1:]
        self.missing = f"its process ended: {' '.join(last)}"[:300]
        return {}


class Disk:
    """What the drive gives, at one ratio of reads to writes."""

    def __init__(self, folder: Path, mix: tuple[int, int], args: argparse.Namespace) -> None:
        file, nbytes = folder / "limit.bin", int(args.limit_gib * GIB) // MIB * MIB
        if not file.exists():
            lay_out(file, nbytes)
        self._limit = DiskLimit(folder, file, nbytes)
        self._mix = Mix(f"{mix[0]}:{mix[1]}", *mix)
        self._settings: list[Setting] = self._limit.finalists([self._mix], args.grid_seconds)[self._mix]
        self._seconds = args.disk_turn_seconds
        self.rates: list[float] = []

    def turn(self) -> None:
        """Measure once more."""
        turns = [self._limit.turn(setting, self._mix, self._seconds) for setting in self._settings]
        self.rates.append(max(turn.bytes_per_second for turn in turns))


def traffic_rate(args: argparse.Namespace) -> float:
    """Bytes a second of host memory, at the update's ratio of reads to writes; 0 without the native module."""
    kernels = host_kernels(args.threads)
    if not isinstance(kernels, NativeKernels):
        return 0.0
    step = OurStep(Configuration("adamw"), Memory(PROBE_NUMEL), kernels)
    rates = []
    for move in Traffic(kernels._pool, step.passes()).variants("traffic").values():
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - begin)
        rates.append(step.param.numel() * step.bytes_per_param / statistics.median(seconds))
    return max(rates)


def rounds(processes: list[Process], disk: Disk, num_rounds: int) -> None:
    """Each once a round, in rotating order."""
    for number in range(num_rounds):
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
        first = number % len(processes)
        disk.turn()
        for process in processes[first:] + processes[:first]:
            # A step whose predecessor left it an update to hide, as in a loop.
            process.steps(2, num_timed=1)


def measure(shape: Shape, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All contestants on one shape."""
    names = [name for name in CONTESTANTS if not args.only or name in args.only]
    with ExitStack() as stack:
        processes = []
        for name in names:
            print(f"{shape.name}: starting {CONTESTANTS[name]}", file=sys.stderr)
            processes.append(Process(name, shape, folder, args))
            stack.callback(processes[-1].close)
            processes[-1].steps(args.warm_up, num_timed=0)
        disk = Disk(folder, mix_of(Demand(disk_read_bytes=24, disk_written_bytes=16)), args)
        rounds(processes, disk, args.rounds)
        for process in processes:
            process.finish()
    return {"shape": shape, "processes": {process.name: process for process in processes}, "disk": disk}


def rows_of(result: dict[str, Any], rate: float, num_params: int) -> list[dict[str, Any]]:
    """A row a contestant."""
    shape, processes, disk = result["shape"], result["processes"], result["disk"]
    plain = processes[PLAIN]
    rows = []
    for name, process in processes.items():
        row: dict[str, Any] = {
            "name": f"{shape.name}: {CONTESTANTS[name]}",
            "contestant": name,
            "tokens": shape.num_tokens,
        }
        rows.append(row)
        if process.missing:
            row["missing"] = process.missing
            continue
        ratios = [own / other for own, other in zip(process.seconds, plain.seconds, strict=True)]
        row |= {
            "step_seconds": spread(process.seconds),
            "ratio_to_plain": spread(ratios),
            "above_baseline_bytes": process.end["peak_bytes"] - process.end["baseline_bytes"],
            "losses": process.losses,
            "loss_difference": max(abs(a / b - 1) for a, b in zip(process.losses, plain.losses, strict=True)),
            "repetitions": process.seconds,
            "versions": process.end["versions"],
        }
        if "bytes_moved" in process.end:
            row |= _own(process.end)
        if name == ALL_NVME:
            moved = row["bytes_moved"]["nvme_read"] + row["bytes_moved"]["nvme_written"]
            floors = [moved / one for one in disk.rates]
            most = [max(pair) for pair in zip(plain.seconds, floors, strict=True)]
            row["disk_floor_seconds"] = spread(floors)
            row["disk_gb_per_second"] = spread([one / 1e9 for one in disk.rates])
            row["ratio_to_maximum"] = spread([own / one for own, one in zip(process.seconds, most, strict=True)])
        if rate:
            row["expected_ratio_to_plain"] = _expected(name, row, plain, rate, num_params)
    return rows


def _own(end: dict[str, Any]) -> dict[str, Any]:
    """What ours report of their last steps."""

    def medians(counts: list[dict[str, float]]) -> dict[str, float]:
        causes = sorted({cause for one in counts for cause in one})
        return {cause: statistics.median(one.get(cause, 0) for one in counts[1:] or counts) for cause in causes}

    medians_of = {name: medians(end[name]) for name in ("bytes_moved", "waits", "work", "hidden_work")}
    return {**medians_of, "leased_bytes": end["leased_bytes"]}


def _expected(name: str, row: dict[str, Any], plain: Process, rate: float, num_params: int) -> float:
    """The ratio to plain PyTorch by the formula: compute, and each contestant's passes over memory."""
    whole = statistics.median(plain.seconds)
    compute = whole - TRAFFIC_BYTES[PLAIN] * num_params / rate
    seconds = compute + TRAFFIC_BYTES[name] * num_params / rate
    floor = row.get("disk_floor_seconds", {"median": 0.0})["median"]
    return float(max(seconds, floor) / whole)


def checks_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that are aimed at."""
    checks = []
    for row in rows:
        if "missing" in row:
            continue
        name = row["name"]
        if row["contestant"] == ALL_HOST and row["tokens"] >= 1024:
            checks.append(check(f"{name}: step, of plain", row["ratio_to_plain"]["median"], MOST_OF_PLAIN, "lower"))
        if row["contestant"] == ALL_NVME and row["tokens"] < 1024:
            ratio = row["ratio_to_maximum"]["median"]
            checks.append(check(f"{name}: step, of max(plain, disk floor)", ratio, MOST_OF_MAXIMUM, "lower"))
            above = row["above_baseline_bytes"]
            checks.append(check(f"{name}: bytes above baseline", above, MOST_NVME_BYTES, "lower"))
        if row["contestant"] in (ALL_HOST, ALL_NVME):
            off = row["loss_difference"]
            checks.append(check(f"{name}: losses, off plain's", off, MOST_LOSS_DIFFERENCE, "lower"))
    return checks


def show(rows: list[dict[str, Any]]) -> None:
    """Print a shape's rows, and the losses."""
    for row in rows:
        if "missing" in row:
            print(f"{row['name']:48} missing: {row['missing']}")
            continue
        ratio = row["ratio_to_plain"]
        print(
            f"{row['name']:48}{row['step_seconds']['median']:8.3f}"
            f"{ratio['median']:8.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            f"{row.get('expected_ratio_to_plain', 0.0):9.3f}{format_bytes(row['above_baseline_bytes']):>12}"
            f"{row['loss_difference']:12.1e}"
        )
        if "ratio_to_maximum" in row:
            floor, most = row["disk_floor_seconds"]["median"], row["ratio_to_maximum"]["median"]
            print(f"    disk floor {floor:.3f} s; of max(plain, disk floor): {most:.3f}")
        for what in ("waits", "work", "hidden_work"):
            words = ", ".join(f"{cause} {value:.3f}" for cause, value in row.get(what, {}).items() if value >= 5e-4)
            if words:
                print(f"    {what.replace('_', ' ')}: {words}")
    with_losses = [row for row in rows if "losses" in row]
    print(f"\n{'losses of step':16}" + "".join(f"{row['contestant']:>12}" for row in with_losses))
    for number, losses in enumerate(zip(*(row["losses"] for row in with_losses), strict=True)):
        print(f"{number + 1:<16}" + "".join(f"{loss:12.6f}" for loss in losses))
    print()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; the result object."""
    block = args.hidden**2 * 4 + 3 * args.hidden * (args.hidden * 9 // 4) + 2 * args.hidden
    num_params = args.layers * block + 2 * args.vocab * args.hidden + args.hidden
    rows: list[dict[str, Any]] = []
    # Two slots a chunk, in the space of each shape's run in turn.
    nbytes = len(args.shapes) * 2 * STATE_BYTES * num_params + int(args.limit_gib * GIB)
    with scratch_folder(args.path, nbytes) as folder:
        where = machine(folder)
        print(f"{where['device']} ({where['file_system']}), {where['usable_cores']} cores of {where['cpu']}")
        print(f"load average before: {where['load_average'][0]:.2f} (whatever else runs here takes from the figures)")
        print(f"{num_params / 1e6:.1f} M parameters; {args.threads} threads\n")
        rate = traffic_rate(args)
        heads = f"{'step s':>8}{'of plain':>8} [quartiles]    {'expected':>9}{'memory':>12}{'loss diff':>12}"
        for shape in args.shapes:
            own = folder / shape.name.replace(" ", "")
            own.mkdir()
            found = rows_of(measure(shape, own, args), rate, num_params)
            print(f"{'':48}{heads}")
            show(found)
            rows += found
            for file in own.rglob("*.bin"):
                file.unlink()
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": versions("transformers"),
        "parameters": num_params,
        "memory_gb_per_second": rate / 1e9,
        "missing": {row["name"]: row["missing"] for row in rows if "missing" in row},
        "rows": rows,
        "checks": checks_of(rows),
    }


def shape_of(text: str) -> Shape:
    """A batch from the command line: 4x256."""
    sequences, length = (count(word) for word in text.split("x"))
    return Shape(sequences, length)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, help="4x256 2x256 if nothing is said")
    parser.add_argument("--rounds", type=count, default=7, help="7")
    parser.add_argument("--warm-up", type=count, default=3, help="steps before; 3")
    parser.add_argument("--only", choices=CONTESTANTS, nargs="+", help="these contestants; plain is always one")
    parser.add_argument("--layers", type=count, default=12)
    parser.add_argument("--hidden", type=count, default=768)
    parser.add_argument("--vocab", type=count, default=32000)
    parser.add_argument("--threads", type=count, default=usable_cores(), help="of torch, and of our kernel")
    parser.add_argument("--host-memory", default="512MiB", help="budget of ours with all on nvme")
    parser.add_argument("--peers-python", help="interpreter of an environment that has DeepSpeed")
    parser.add_argument("--limit-gib", type=positive, default=4.0, help="file that the limit is measured on; 4")
    parser.add_argument("--grid-seconds", type=positive, default=0.5, help="of each setting of the limit; 0.5")
    parser.add_argument("--disk-turn-seconds", type=positive, default=1.0, help="of the limit in a round; 1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.only:
        args.only = [PLAIN, *args.only]
    return args


def main() -> None:
    """Run and report."""
    args = arguments()
    result = run(args)
    tell(result, args.json)


if __name__ == "__main__":
    main()
