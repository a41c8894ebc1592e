"""How near the nvme tier comes to what the drive gives, reading, writing, and both at the same time.

The limit is a C loop that does nothing but transfers (disk_limit.c): the better of pread/pwrite threads and io_uring,
each with the best of a few block sizes and depths, in the same part of the same file, with O_DIRECT and from huge
pages. fio is shown beside it where it is installed; it cannot ask for transparent huge pages, so that its figure is no
limit where none are reserved. The tier is used as a run uses it: records of whole chunks, through as many staging slots
as a run has, in two slots a chunk ("kept", whose writes are checksummed) or one ("scratch").

    python benchmarks/nvme_bandwidth.py /mnt/nvme --json nvme_bandwidth.json

Files of 4 x --gib are written before anything is timed. All contenders take turns of up to half a second, in rotating
order, until each has had --seconds in all. That time is cut into --repetitions, whose medians and quartiles are shown;
ratios are of figures of the same repetition. A missed target does not change the exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from disk_limit import (
    NO_TURN,
    Contender,
    DiskLimit,
    Fio,
    Mix,
    Turn,
    check,
    count,
    machine,
    positive,
    scratch_folder,
    spread,
    take_turns,
    tell,
    timed,
    versions,
)

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import choose_engine
from zerooffload.errors import ConfigError
from zerooffload.formats import GIB, MIB
from zerooffload.memory import Budget
from zerooffload.planner.placement import CHUNK_NUMEL, NUM_STAGING_SLOTS
from zerooffload.telemetry import Recorder, Waits
from zerooffload.tiers import Kept, NvmeTier, Part, RecordLayout, StagingRing
from zerooffload.tiers.directory import RunDirectory

if TYPE_CHECKING:
    from zerooffload.aio import Engine
    from zerooffload.tiers.nvme import NvmeBlock

ENGINES = ("uring", "threads", "aiofiles")
TARGETS = {"uring": 0.95, "threads": 0.90}
MIXES = (
    Mix("read", 1, 0),
    Mix("write", 0, 1),
    # An update, whose gradients are in memory, reads and writes 12 bytes a parameter.
    Mix("1:1", 1, 1),
    # With fp32 gradients on nvme it reads 16 and writes 12; so does a step of a bf16 model that reads parameters twice.
    Mix("4:3", 4, 3),
)
RECORDS = {"12 B": 3, "4 B": 1}
"""fp32 parts of a record: what is read and written in an update, and a parameter alone."""
TURN_SECONDS = 0.5
GRID_SECONDS = 0.6
"""Of each setting of the limit, before the best take part."""


@dataclass(frozen=True)
class Point:
    """One figure: who, on what, doing what."""

    who: str
    what: str
    mix: Mix

    @property
    def name(self) -> str:
        """In one line."""
        return f"{self.who} {self.what} {self.mix.name}"


class TierUser:
    """Reads and writes whole records of one block through a ring, like an update that computes nothing."""

    def __init__(self, tier: NvmeTier, block: NvmeBlock, ring: StagingRing) -> None:
        self._tier = tier
        self._block = block
        self._ring = ring
        self._waits = Waits(Recorder())
        self._num_done: dict[tuple[str, Mix], int] = {}

    def write_all(self, noise: torch.Tensor) -> None:
        """The first write of every record in all its slots, with bytes that no drive can make short work of."""
        for chunk in range(self._block.layout.num_chunks):
            slot = self._ring.acquire(self._waits)
            record = slot.take(self._block.layout.file_nbytes(chunk))
            record.copy_(noise[: record.numel()])
            self._ring.release(slot, [self._block.initialize(chunk, record)])
        self._ring.drain(self._waits)

    def turn(self, engine: Engine, mix: Mix, seconds: float) -> Turn:
        """Keep the ring full for that long; goes on from the chunk where its last turn ended."""
        self._tier.engine = engine
        return timed(partial(self._move, engine.name, mix, seconds))

    def _move(self, engine: str, mix: Mix, seconds: float) -> int:
        layout, both = self._block.layout, mix.reads + mix.writes
        number, moved_bytes, until = self._num_done.get((engine, mix), 0), 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            num_reads = number * mix.reads // both
            is_read = (number + 1) * mix.reads // both > num_reads
            # Writes are half a sweep ahead, like in the limit.
            chunk = (num_reads if is_read else number - num_reads + layout.num_chunks // 2) % layout.num_chunks
            slot = self._ring.acquire(self._waits)
            record = slot.take(layout.file_nbytes(chunk))
            ticket = self._block.read(chunk, record) if is_read else self._block.write(chunk, record)
            self._ring.release(slot, [ticket])
            moved_bytes += record.numel()
            number += 1
            if number % layout.num_chunks == 0:
                # What a commit does once a step: the written slots are then the ones to be read and kept.
                self._tier.slots.commit(self._tier.slots.state())
        self._num_done[engine, mix] = number
        self._ring.drain(self._waits)
        return moved_bytes


class Tier:
    """The tier under test, its blocks written once, and the engines that take turns with it."""

    def __init__(self, folder: Path, block_bytes: int, stack: ExitStack) -> None:
        self.engines: dict[str, Engine] = {}
        self.missing: dict[str, str] = {}
        for name in ENGINES:
            try:
                self.engines[name] = choose_engine(name).engine
            except ConfigError as error:
                self.missing[name] = str(error)
                continue
            stack.callback(self.engines[name].close)
        budget = Budget("benchmark", 64 * block_bytes)
        first = next(iter(self.engines.values()))
        self.tier = NvmeTier([RunDirectory(folder)], budget, first, Recorder())
        stack.callback(self.tier.close)
        self.users: dict[str, TierUser] = {}
        self.rings: list[StagingRing] = []
        for name, num_parts in RECORDS.items():
            # A block of two slots takes as much as one of one slot has records, so that all files' parts are alike.
            layout = self._layout(num_parts, block_bytes // 2)
            ring = StagingRing(name, NUM_STAGING_SLOTS, layout.file_nbytes(0), budget, CpuAccelerator())
            self.rings.append(ring)
            self.users[f"{name} kept"] = self._user(name, layout, ring, Kept(name, 2))
            self.users[f"{name} scratch"] = self._user(name, self._layout(num_parts, block_bytes), ring, None)
        self.tier.reserve()
        self._register()
        # The kept block of the larger records lies at the beginning.
        self.limit_file = self.tier.state_files[0].path
        self.limit_bytes = 2 * self._layout(3, block_bytes // 2).total_file_nbytes

    def write_all(self) -> None:
        """The first write of everything; a second one, so that file systems are through with what they put off."""
        noise = torch.randint(0, 256, (3 * 4 * CHUNK_NUMEL,), dtype=torch.uint8)
        for _ in range(2):
            for user in self.users.values():
                user.write_all(noise)
            for file in self.tier.state_files:
                self.tier.engine.submit_flush(file).wait()

    def _layout(self, num_parts: int, nbytes: int) -> RecordLayout:
        parts = tuple(Part(f"part {number}", torch.float32) for number in range(num_parts))
        record_bytes = num_parts * 4 * CHUNK_NUMEL
        return RecordLayout(parts, max(1, nbytes // record_bytes) * CHUNK_NUMEL, CHUNK_NUMEL)

    def _user(self, name: str, layout: RecordLayout, ring: StagingRing, kept: Kept | None) -> TierUser:
        return TierUser(self.tier, self.tier.allocate(layout, name, kept), ring)

    def _register(self) -> None:
        for engine in self.engines.values():
            for ring in self.rings:
                for buffer in ring.buffers:
                    engine.register(buffer)


def contenders(
    tier: Tier, limit: DiskLimit, fio: Fio, grid_seconds: float
) -> tuple[dict[Point, Contender], dict[Point, str]]:
    """All that take turns, and of the limit's points with which settings."""
    points: dict[Point, Contender] = {}
    settings: dict[Point, str] = {}
    for name, engine in tier.engines.items():
        for what, user in tier.users.items():
            # Plain Python is for where nothing else works: one block shows how it does.
            if name == "aiofiles" and what != "12 B kept":
                continue
            for mix in MIXES:
                points[Point(name, what, mix)] = partial(user.turn, engine, mix)
    for mix, best in limit.finalists(MIXES, grid_seconds).items():
        for setting in best:
            point = Point("limit", setting.engine, mix)
            points[point], settings[point] = partial(limit.turn, setting, mix), str(setting)
    for setting in fio.working_settings():
        for mix in MIXES:
            point = Point("fio", setting.engine, mix)
            points[point], settings[point] = partial(fio.turn, setting, mix), str(setting)
    return points, settings


def measured(points: Mapping[Point, Contender], args: argparse.Namespace) -> dict[Point, list[Turn]]:
    """For each point what it moved in each repetition."""
    seconds = args.seconds / args.repetitions
    repetitions: dict[Point, list[Turn]] = {point: [] for point in points}
    for number in range(args.repetitions):
        print(f"repetition {number + 1} of {args.repetitions}", file=sys.stderr)
        for point, turn in take_turns(points, seconds, min(TURN_SECONDS, seconds)).items():
            repetitions[point].append(turn)
    return repetitions


def rows_of(repetitions: Mapping[Point, list[Turn]], settings: Mapping[Point, str]) -> list[dict[str, Any]]:
    """A row a point, with the ratio to the better limit of the same mix."""
    rates = {point: [turn.bytes_per_second for turn in turns] for point, turns in repetitions.items()}
    rows = []
    for point, turns in repetitions.items():
        limits = [other for other in rates if other.who == "limit" and other.mix == point.mix]
        limit = max(limits, key=lambda other: spread(rates[other])["median"])
        ratios = [own / most for own, most in zip(rates[point], rates[limit], strict=True)]
        whole = sum(turns, NO_TURN)
        rows.append(
            {
                "name": point.name,
                "who": point.who,
                "what": point.what,
                "mix": point.mix.name,
                "setting": settings.get(point, "default"),
                "gb_per_second": spread([rate / 1e9 for rate in rates[point]]),
                "limit": limit.name,
                "ratio_to_limit": spread(ratios),
                "target": TARGETS.get(point.who),
                "cpu_seconds_per_gb": whole.cpu_seconds / whole.moved_bytes * 1e9,
                "repetitions": [vars(turn) for turn in turns],
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'':34}{'GB/s':>7} [quartiles]      of limit [quartiles]     target  CPU s/GB")
    for mix in MIXES:
        for row in (row for row in rows if row["mix"] == mix.name):
            rate, ratio = row["gb_per_second"], row["ratio_to_limit"]
            target = f"{row['target']:.2f}" if row["target"] else ""
            name = f"{mix.name:7}{row['who']} {row['what']}"
            setting = "" if row["setting"] == "default" else f"  ({row['setting']})"
            print(
                f"{name:34}{rate['median']:7.2f} [{rate['low']:.2f}, {rate['high']:.2f}]"
                f"{ratio['median']:10.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]{target:>9}"
                f"{row['cpu_seconds_per_gb']:10.3f}{setting}"
            )
        print()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Lay out the files, measure and print; the result object."""
    block_bytes = int(args.gib * GIB)
    with scratch_folder(args.path, 4 * block_bytes) as folder, ExitStack() as stack:
        tier = Tier(folder, block_bytes, stack)
        tier.write_all()
        limit = DiskLimit(folder, tier.limit_file, tier.limit_bytes)
        fio = Fio(tier.limit_file, tier.limit_bytes)
        where = machine(folder)
        points, settings = contenders(tier, limit, fio, min(GRID_SECONDS, args.seconds))
        repetitions = measured(points, args)
    rows = rows_of(repetitions, settings)
    missing = {**tier.missing, **{f"limit {name}": why for name, why in limit.why_missing.items()}}
    if fio.why_missing:
        missing["fio"] = fio.why_missing
    print(f"{where['device']} ({where['file_system']}), {where['usable_cores']} cores of {where['cpu']}")
    print(f"load average before: {where['load_average'][0]:.2f} (whatever else runs here takes from the figures)\n")
    show(rows)
    for name, why in missing.items():
        print(f"{name}: missing, {why}")
    print(
        f"limit: {limit.huge_page_share:.0%} of its buffers on huge pages,"
        f" io_uring's buffers {'registered' if limit.is_registered else 'NOT registered'}"
    )
    if not fio.why_missing:
        pages = "huge pages" if fio.has_huge_pages else "its default buffers of small pages: none are reserved here"
        print(f"{fio.version}: on {pages}")
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": {**versions("aiofiles"), **({"fio": fio.version} if fio.version else {})},
        "missing": missing,
        "fio_on_huge_pages": fio.has_huge_pages,
        "limit_huge_page_share": limit.huge_page_share,
        "limit_buffers_registered": limit.is_registered,
        "rows": rows,
        "checks": [check(row["name"], row["ratio_to_limit"]["median"], row["target"]) for row in rows if row["target"]],
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--seconds", type=positive, default=10.0, help="of each figure in all; 10 if nothing is said")
    parser.add_argument("--gib", type=positive, default=4.0, help="of each of four blocks of records; 4")
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    least = 96 * MIB / GIB
    if args.gib < least:
        parser.error(f"--gib: two records in two slots take {least:.3f} at least, got {args.gib}")
    return args


def main() -> None:
    """Run and report."""
    args = arguments()
    result = run(args)
    tell(result, args.json)


if __name__ == "__main__":
    main()
