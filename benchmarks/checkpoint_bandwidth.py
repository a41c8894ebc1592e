"""How near saving a checkpoint comes to what the drive gives, and how long it keeps the training thread.

AdamW in fp32 over a few large parameters, whose states are all on host or all on nvme. A save from host writes 12 bytes
a parameter, one from nvme also reads them. Each is timed from the call until the checkpoint is there, flushes included.
The limit is a C loop that only transfers (disk_limit.c, the better of threads and io_uring, each with the best of a few
settings): writes, or as many reads as writes. Before each save it goes over the very files that the save will write
over, since a drive may take bytes at one place faster than at another.

Then saves go on beside training, whose steps compute for --compute seconds and then update. What keeps the training
thread is the call itself, and waiting for chunks that are not read yet; `step` in the table is the median step beside a
save and without one.

    python benchmarks/checkpoint_bandwidth.py /mnt/nvme --json checkpoint_bandwidth.json

Takes 36 bytes of space a parameter, and from host 16 of memory. A missed target does not change the exit status; bytes
that are not those of the formula do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from disk_limit import (
    NO_TURN,
    DiskLimit,
    Mix,
    Turn,
    check,
    count,
    machine,
    positive,
    refuse_wrong_bytes,
    scratch_folder,
    spread,
    tell,
    versions,
)
from optimizer_stream import MOST_TURN_SECONDS, PATTERN_NUMEL, Model, Weights

import zerooffload as zo
from zerooffload.formats import GIB, MIB, format_bytes, round_up
from zerooffload.telemetry import Wait

if TYPE_CHECKING:
    from disk_limit import Setting

STATE_BYTES = 12
MIXES = {"host": Mix("write", 0, 1), "nvme": Mix("1:1", 1, 1)}
"""What the drive does in a save, by the home of all states."""
NUM_NEW = 2
"""Saves into new files: from the third on, those of the last but one are written over."""
LEAST_RATIO = 0.9
MOST_BLOCKED = 0.05
GRID_SECONDS = 1.0
BLOCK_BYTES = MIB
"""The limit goes over whole ones of a file."""
BYTES_TOLERANCE = 0.01


class Trained:
    """An offloaded model that was trained for a step, with its gradients, and its checkpoints."""

    def __init__(self, home: str, folder: Path, args: argparse.Namespace) -> None:
        pattern = torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(0))
        self._model = Model(args.parameters, pattern)
        self.state_bytes = STATE_BYTES * sum(param.numel() for param in self._model.parameters())
        self._directory = folder / "checkpoints"
        drive = folder / "drive"
        drive.mkdir()
        config = zo.OffloadConfig(
            params=home,
            optimizer=home,
            gradients="host",
            nvme_paths=(drive,),
            units=[Weights],
            host_memory=2 * self.state_bytes + GIB,
            io_engine=args.engine,
            atomic_steps=False,
        )
        zo.offload(self._model, config)
        self._optimizer = zo.AdamW(self._model.parameters(), lr=1e-4)
        self._compute_seconds = args.compute
        self._model().backward()
        self.step()

    def save(self, *, blocking: bool) -> Any:
        """The ticket of one."""
        return zo.save(self._directory, self._model, self._optimizer, blocking=blocking, keep_last=1)

    def step(self) -> tuple[float, float]:
        """Seconds of a step with its compute, and of waiting for a save in it. Gradients stay what they are."""
        start = time.perf_counter()
        # Where forward and backward would be.
        time.sleep(self._compute_seconds)
        self._optimizer.step()
        seconds = time.perf_counter() - start
        return seconds, zo.step_report(self._model).waits.get(Wait.SNAPSHOT.value, 0.0)

    @property
    def next_files(self) -> list[Path]:
        """That the next save will write over."""
        return sorted(self._directory.glob(".save-*.part/*.safetensors"))

    @property
    def saved_bytes(self) -> int:
        """Of the newest checkpoint's files."""
        newest = max(self._directory.glob("save-*"))
        return sum(file.stat().st_size for file in newest.glob("*.safetensors"))

    def close(self) -> None:
        """End the run."""
        zo.close(self._model)


def timed_save(trained: Trained) -> float:
    """Seconds of a save, all of it."""
    begin = time.perf_counter()
    trained.save(blocking=True)
    return time.perf_counter() - begin


def timed_saves(
    trained: Trained, limit: DiskLimit, settings: list[Setting], mix: Mix, args: argparse.Namespace
) -> tuple[list[float], dict[Setting, list[Turn]]]:
    """Seconds of each save, and for each setting a turn as long before each, over the files of that save."""
    seconds: list[float] = []
    turns: dict[Setting, list[Turn]] = {setting: [] for setting in settings}
    turn_seconds = args.grid_seconds
    for number in range(args.saves):
        for setting in settings:
            turns[setting].append(turn_over(trained.next_files, limit, setting, mix, turn_seconds))
        seconds.append(timed_save(trained))
        turn_seconds = min(seconds[-1], MOST_TURN_SECONDS)
        print(f"save {number + 1} of {args.saves}", file=sys.stderr)
    return seconds, turns


def turn_over(files: list[Path], limit: DiskLimit, setting: Setting, mix: Mix, seconds: float) -> Turn:
    """So long in all, in one file after the other."""
    return sum((limit.turn(setting, mix, seconds / len(files), file) for file in files), NO_TURN)


def beside_training(trained: Trained, num_saves: int) -> tuple[list[float], list[float], list[float]]:
    """The blocked share of each save's length; seconds of steps beside them, and of steps without one."""
    shares, beside, alone = [], [], []
    for _ in range(num_saves):
        begin = time.perf_counter()
        ticket = trained.save(blocking=False)
        blocked = time.perf_counter() - begin
        while not ticket.done():
            seconds, waited = trained.step()
            beside.append(seconds)
            blocked += waited
        ticket.wait()
        shares.append(blocked / (time.perf_counter() - begin))
        alone.append(trained.step()[0])
    return shares, beside, alone


def measure(home: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a placement."""
    own = folder / home
    own.mkdir()
    mix = MIXES[home]
    try:
        trained = Trained(home, own, args)
    except zo.ZeroOffloadError as error:
        raise SystemExit(f"{home}: {error}") from error
    try:
        new_seconds = [timed_save(trained) for _ in range(NUM_NEW)]
        file, *_ = trained.next_files
        limit = DiskLimit(own, file, file.stat().st_size // BLOCK_BYTES * BLOCK_BYTES)
        settings = limit.finalists([mix], args.grid_seconds)[mix]
        seconds, turns = timed_saves(trained, limit, settings, mix, args)
        shares, beside, alone = beside_training(trained, args.saves)
        saved_bytes = trained.saved_bytes
    finally:
        trained.close()
        for path in (own / "checkpoints").rglob("*.safetensors"):
            path.unlink()
    of_settings = {setting: [turn.bytes_per_second for turn in of_one] for setting, of_one in turns.items()}
    setting = max(of_settings, key=lambda one: statistics.median(of_settings[one]))
    moved_bytes = trained.state_bytes * (mix.reads + mix.writes)
    new, rates = ([moved_bytes / one for one in part] for part in (new_seconds, seconds))
    return {
        "name": f"from {home}",
        "state_bytes": trained.state_bytes,
        "saved_bytes": saved_bytes,
        "moved_bytes": moved_bytes,
        "limit": str(setting),
        "limits_missing": limit.why_missing,
        "limit_gb_per_second": spread([rate / 1e9 for rate in of_settings[setting]]),
        "gb_per_second": spread([rate / 1e9 for rate in rates]),
        "new_files_gb_per_second": spread([rate / 1e9 for rate in new]),
        "save_seconds": spread(seconds),
        "ratio_to_limit": spread([rate / most for rate, most in zip(rates, of_settings[setting], strict=True)]),
        "blocked_share": spread(shares),
        "step_seconds_beside": spread(beside),
        "step_seconds_alone": spread(alone),
    }


def checks_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's figures that are aimed at."""
    name = row["name"]
    off = abs(row["saved_bytes"] / row["state_bytes"] - 1)
    return [
        check(f"{name}: bandwidth, of the limit", row["ratio_to_limit"]["median"], LEAST_RATIO),
        check(f"{name}: training thread blocked, of the save", row["blocked_share"]["median"], MOST_BLOCKED, "lower"),
        check(f"{name}: bytes saved, off the formula", off, BYTES_TOLERANCE, "lower"),
    ]


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    ratio, blocked = row["ratio_to_limit"], row["blocked_share"]
    print(
        f"{row['name']:12}{row['save_seconds']['median']:8.3f}{row['gb_per_second']['median']:8.2f}"
        f"{row['limit_gb_per_second']['median']:8.2f}{ratio['median']:8.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        f"{blocked['median']:9.3f}{row['step_seconds_beside']['median']:9.3f}{row['step_seconds_alone']['median']:9.3f}"
    )
    print(f"    the limit: {row['limit']}; into new files: {row['new_files_gb_per_second']['median']:.2f} GB/s")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Lay out the files, measure and print; the result object."""
    state_bytes = STATE_BYTES * round_up(args.parameters, PATTERN_NUMEL)
    with scratch_folder(args.path, 3 * state_bytes) as folder:
        where = machine(folder)
        rows = [measure(home, folder, args) for home in MIXES]
    print(f"{where['device']} ({where['file_system']}), {where['usable_cores']} cores of {where['cpu']}")
    print(f"load average before: {where['load_average'][0]:.2f} (whatever else runs here takes from the figures)")
    print(f"{format_bytes(state_bytes)} of states\n")
    print(
        f"{'':12}{'save s':>8}{'GB/s':>8}{'limit':>8}{'ratio':>8} [quartiles]   {'blocked':>9}{'step s':>9}{'alone':>9}"
    )
    for row in rows:
        show(row)
    missing = {f"limit {name}": why for row in rows for name, why in row["limits_missing"].items()}
    for name, why in missing.items():
        print(f"{name}: missing, {why}")
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": versions(),
        "missing": missing,
        "rows": rows,
        "checks": [item for row in rows for item in checks_of(row)],
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--parameters", type=count, default=500_000_000, metavar="N", help="500e6 if nothing is said")
    parser.add_argument("--saves", type=count, default=5, metavar="N", help="of each kind; 5")
    parser.add_argument("--compute", type=positive, default=1.0, metavar="SECONDS", help="of a step; 1")
    parser.add_argument("--grid-seconds", type=positive, default=GRID_SECONDS, metavar="SECONDS")
    parser.add_argument("--engine", choices=("auto", "uring", "threads", "aiofiles"), default="auto")
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
