"""The limit that drive benchmarks compare with: `disk_limit.c` with the best of a grid of settings, and fio beside it.

What is compared takes turns of a fraction of a second, so that whatever else uses the drive meanwhile slows all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

import zerooffload as zo
from zerooffload.accelerator import populated_pages
from zerooffload.formats import GIB, KIB, MIB, format_bytes
from zerooffload.machine.cores import usable_cores

SOURCE = Path(__file__).with_name("disk_limit.c")
_LEFT_FREE_BYTES = GIB
"""On the drive, for others."""


@dataclass(frozen=True)
class Mix:
    """Of `reads + writes` transfers, how many read."""

    name: str
    reads: int
    writes: int


@dataclass(frozen=True)
class Turn:
    """What was moved in how long, and the CPU time of all threads."""

    moved_bytes: int
    seconds: float
    cpu_seconds: float

    def __add__(self, other: Turn) -> Turn:
        return Turn(
            self.moved_bytes + other.moved_bytes, self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds
        )

    @property
    def bytes_per_second(self) -> float:
        """Read and written together."""
        return self.moved_bytes / self.seconds if self.seconds else 0.0


NO_TURN = Turn(0, 0.0, 0.0)
K = TypeVar("K")
Contender = Callable[[float], Turn]
"""Moves bytes for about that many seconds."""


@dataclass(frozen=True)
class Setting:
    """One way of disk_limit.c."""

    engine: str
    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.engine} {format_bytes(self.block_bytes)} x {self.depth}"


GRID = (
    Setting("threads", MIB, 8),
    Setting("threads", 4 * MIB, 4),
    Setting("threads", 8 * MIB, 8),
    Setting("threads", 24 * MIB, 4),
    Setting("uring", 256 * KIB, 64),
    Setting("uring", MIB, 16),
    Setting("uring", MIB, 64),
    Setting("uring", 4 * MIB, 8),
    Setting("uring", 4 * MIB, 24),
)


class DiskLimit:
    """The compiled program, and how it is on one file.

    Parameters
    ----------
    folder : pathlib.Path
        For the program.
    file : pathlib.Path
        Preallocated, and written to before. Its contents are lost.
    length_bytes : int
        Of the file, how much is swept.

    Attributes
    ----------
    why_missing : dict[str, str]
        The engines of it that cannot work here.
    """

    def __init__(self, folder: Path, file: Path, length_bytes: int) -> None:
        self._program = compiled(folder)
        self._file = file
        self._length_bytes = length_bytes
        self._next: dict[tuple[Setting, Mix], int] = {}
        self.why_missing: dict[str, str] = {}
        self.huge_page_share = 1.0
        self.is_registered = True

    def turn(self, setting: Setting, mix: Mix, seconds: float, file: Path | None = None) -> Turn:
        """Move bytes for that long, from where its last turn ended on; also in another file of that length."""
        key = (setting, mix)
        numbers = (self._length_bytes, setting.block_bytes, setting.depth, mix.reads, mix.writes, seconds)
        command = [self._program, setting.engine, file or self._file, *numbers, self._next.get(key, 0)]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise OSError(done.stderr.strip())
        result = json.loads(done.stdout)
        self._next[key] = result["next"]
        self.huge_page_share = min(self.huge_page_share, result["huge_page_share"])
        self.is_registered &= setting.engine != "uring" or result["registered"]
        return Turn(result["read_bytes"] + result["written_bytes"], result["seconds"], result["cpu_seconds"])

    def finalists(self, mixes: Sequence[Mix], seconds: float) -> dict[Mix, list[Setting]]:
        """For each mix the fastest setting of each engine, by `seconds` of each of the grid."""
        grid = [setting for setting in GRID if setting.block_bytes * 2 <= self._length_bytes]
        contenders: dict[tuple[Mix, Setting], Contender] = {}
        for setting in grid:
            try:
                self.turn(setting, mixes[0], min(seconds, 0.01))
            except OSError as error:
                self.why_missing[setting.engine] = str(error)
                continue
            for mix in mixes:
                contenders[mix, setting] = partial(self.turn, setting, mix)
        if not contenders:
            raise SystemExit(f"the limit cannot be measured: {'; '.join(self.why_missing.values())}")
        rates = {key: turn.bytes_per_second for key, turn in take_turns(contenders, seconds, seconds / 2).items()}
        best: dict[Mix, list[Setting]] = {}
        for mix in mixes:
            for engine in dict.fromkeys(setting.engine for mix_, setting in rates if mix_ == mix):
                own = [setting for mix_, setting in rates if mix_ == mix and setting.engine == engine]
                best.setdefault(mix, []).append(max(own, key=lambda setting: rates[mix, setting]))
        return best


def compiled(folder: Path) -> Path:
    """The program, made in that folder."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SystemExit(
            "the limit is measured by a C program, but there is no C compiler (cc): install one, or set CC"
        )
    program = folder / "disk_limit"
    command = [compiler, "-O2", "-pthread", "-o", str(program), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own source
    if done.returncode:
        raise SystemExit(f"{SOURCE.name} cannot be compiled: {done.stderr.strip()}")
    return program


def lay_out(file: Path, nbytes: int) -> None:
    """Make a file of that length, preallocated and then written once, past the page cache."""
    noise = populated_pages(8 * MIB)
    noise.copy_(torch.randint(0, 256, (noise.numel(),), dtype=torch.uint8))
    view = memoryview(noise.numpy().data)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        written = 0
        while written < nbytes:
            written += os.pwrite(fd, view[: nbytes - written], written)
        os.fsync(fd)
    finally:
        os.close(fd)


def take_turns(contenders: Mapping[K, Contender], seconds: float, turn_seconds: float) -> dict[K, Turn]:
    """Round robin until each had `seconds`; the next round begins with another one."""
    totals = dict.fromkeys(contenders, NO_TURN)
    order = list(contenders)
    while any(total.seconds < seconds for total in totals.values()):
        for key in order:
            if totals[key].seconds < seconds:
                totals[key] += contenders[key](turn_seconds)
        order = order[1:] + order[:1]
    return totals


# --- fio


FIO_SETTINGS = (Setting("io_uring", MIB, 64), Setting("psync", 4 * MIB, 4))


class Fio:
    """fio on a file, direct, on huge pages where the system has some reserved.

    Attributes
    ----------
    why_missing : str
        "" where it can be used.
    has_huge_pages : bool
    """

    def __init__(self, file: Path, length_bytes: int) -> None:
        self._file = file
        self._length_bytes = length_bytes
        found = shutil.which("fio")
        self._program = found or "fio"
        self.why_missing = "" if found else "fio is not installed"
        most_bytes = max(setting.block_bytes * setting.depth for setting in FIO_SETTINGS)
        # Some pages more: each of its jobs rounds up by itself.
        self.has_huge_pages = _free_huge_page_bytes() >= most_bytes + 16 * MIB
        self.version = "" if self.why_missing else self._answer("--version").strip()

    def turn(self, setting: Setting, mix: Mix, seconds: float) -> Turn:
        """Move bytes for that long."""
        jobs, depth = (1, setting.depth) if setting.engine == "io_uring" else (setting.depth, 1)
        job_bytes = self._length_bytes // jobs // setting.block_bytes * setting.block_bytes
        directions = "rw" if mix.reads and mix.writes else "read" if mix.reads else "write"
        answer = self._answer(
            "--name=limit",
            f"--filename={self._file}",
            f"--size={job_bytes}",
            f"--offset_increment={job_bytes}",
            f"--bs={setting.block_bytes}",
            f"--ioengine={setting.engine}",
            f"--iodepth={depth}",
            f"--numjobs={jobs}",
            f"--rw={directions}",
            *([f"--rwmixread={round(100 * mix.reads / (mix.reads + mix.writes))}"] if directions == "rw" else []),
            f"--runtime={max(1, round(seconds * 1000))}ms",
            "--time_based",
            "--direct=1",
            "--thread",
            "--group_reporting",
            "--allow_file_create=0",
            "--overwrite=1",
            *(["--fixedbufs", "--registerfiles"] if setting.engine == "io_uring" else []),
            *(["--iomem=mmaphuge"] if self.has_huge_pages else []),
            "--output-format=json",
        )
        job = json.loads(answer[answer.index("{") :])["jobs"][0]
        moved = [job[direction] for direction in ("read", "write") if job[direction]["io_bytes"]]
        took = max(direction["runtime"] for direction in moved) / 1000
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Turn(sum(direction["io_bytes"] for direction in moved), took, cpu_share * took * jobs)

    def working_settings(self) -> list[Setting]:
        """Those of `FIO_SETTINGS` that can be used here; else `why_missing` tells."""
        working = []
        for setting in () if self.why_missing else FIO_SETTINGS:
            if setting.block_bytes * setting.depth > self._length_bytes:
                self.why_missing = "the file is too small for it"
                continue
            try:
                self.turn(setting, Mix("read", 1, 0), 0.05)
                working.append(setting)
            except (OSError, ValueError, LookupError) as error:
                self.why_missing = f"fio failed with {setting.engine}: {error}"
        return working

    def _answer(self, *options: str) -> str:
        # It leaves a file of statistics where it runs.
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(  # noqa: S603 - found on the path
                [self._program, *options], capture_output=True, text=True, check=False, cwd=folder
            )
        if done.returncode:
            raise OSError(done.stderr.strip() or done.stdout.strip()[:200])
        return done.stdout


def _free_huge_page_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("HugePages_Free", 0) * fields.get("Hugepagesize", 0) * KIB


# --- what every result has


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("median", "low", "high"), values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def check(name: str, value: float, target: float, better: str = "higher") -> dict[str, Any]:
    """A figure that is aimed at."""
    is_ok = value >= target if better == "higher" else value <= target
    return {"name": name, "value": value, "target": target, "better": better, "ok": is_ok}


def show_checks(checks: Sequence[Mapping[str, Any]]) -> None:
    """Print them, and how many were missed."""
    print()
    for item in checks:
        print(
            f"{'ok' if item['ok'] else 'MISSED':7}{item['name']}: {item['value']:.3f}"
            f" ({item['better']} than {item['target']} is wanted)"
        )
    print(f"\n{sum(not item['ok'] for item in checks)} of {len(checks)} targets missed")


def tell(result: Mapping[str, Any], json_file: Path | None) -> None:
    """Print the checks of a benchmark's result, and write all of it where that is asked for."""
    show_checks(result["checks"])
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def add_result_files(parser: argparse.ArgumentParser) -> None:
    """The words for where a result goes, as a table and as numbers."""
    parser.add_argument("--table", type=Path, metavar="FILE.md")
    parser.add_argument("--json", type=Path, metavar="FILE")


def tell_with_table(
    result: Mapping[str, Any], args: argparse.Namespace, markdown: Callable[[Mapping[str, Any]], str]
) -> None:
    """As `tell`, to the files of `add_result_files`."""
    tell(result, args.json)
    if args.table is not None:
        args.table.write_text(markdown(result), encoding="utf-8")


def on_what(result: Mapping[str, Any]) -> str:
    """The machine and the torch of a benchmark's result, in words."""
    where = result["machine"]
    cores = f"{where['usable_cores']} cores of {where['cpu']}, {where['memory_bytes'] / GIB:.0f} GiB"
    return f"{cores}; torch {result['versions']['torch']}"


def refuse_wrong_bytes(checks: Sequence[Mapping[str, Any]]) -> None:
    """End with an error if a check of bytes failed: what moved is not a matter of speed."""
    if not all(item["ok"] for item in checks if "bytes" in item["name"]):
        raise SystemExit("the bytes that moved are not those of the formula")


def machine(folder: Path) -> dict[str, Any]:
    """Where this runs."""
    setting, cpus = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    mounts = [
        disk for disk in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(Path(disk.mountpoint))
    ]
    mount = max(mounts, key=lambda disk: len(disk.mountpoint), default=None)
    return {
        "platform": platform.platform(),
        "cpu": models[0] if models else platform.processor(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "transparent_huge_pages": setting.read_text(encoding="ascii").strip() if setting.exists() else "unknown",
        "device": mount.device if mount else "unknown",
        "file_system": mount.fstype if mount else "unknown",
        "load_average": list(psutil.getloadavg()),
    }


def versions(*packages: str) -> dict[str, str]:
    """Of everything that takes part, as far as it is installed."""
    found = {"zerooffload": zo.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@contextmanager
def scratch_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """A folder for `nbytes` of files in `path`, gone at the end, also when the process is told to end.

    Raises
    ------
    SystemExit
        If the path is no folder, cannot be written to, or has not that much free.
    """
    if not path.is_dir():
        raise SystemExit(f"{path} is not a folder: name one on the drive that is to be measured")
    free = shutil.disk_usage(path).free
    if free < nbytes + _LEFT_FREE_BYTES:
        raise SystemExit(
            f"{path} has {format_bytes(free)} free, but this takes {format_bytes(nbytes)} and leaves"
            f" {format_bytes(_LEFT_FREE_BYTES)}: free space, or ask for less"
        )
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix=".zerooffload-benchmark-", dir=path) as folder:
            yield Path(folder)
    except PermissionError as error:
        raise SystemExit(f"{path} cannot be used: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def timed(work: Callable[[], int]) -> Turn:
    """A turn of this process: `work` returns the bytes that it moved."""
    start, cpu = time.perf_counter(), time.process_time()
    moved_bytes = work()
    return Turn(moved_bytes, time.perf_counter() - start, time.process_time() - cpu)


def positive(text: str) -> float:
    """A number above 0, for the command line."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def count(text: str) -> int:
    """A whole number above 0, also written 600e6, for the command line."""
    value = positive(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)
