"""`zerooffload calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zerooffload.calibration import calibrate, figure_of, machine_file
from zerooffload.errors import ConfigError, InternalError
from zerooffload.formats import format_bytes, format_rate
from zerooffload.planner.profiles import MachineProfile, write_machine

_WORDS = {
    "matmul_flops": "matrix products",
    "memory_bandwidth": "memory",
    "operation_seconds": "an operation on nothing",
    "copy_in": "copies in",
    "copy_out": "copies out",
    "copy_both": "copies in and out together",
    "update_bandwidth": "the optimizer's update",
    "first_touch_bandwidth": "first touches of new memory",
    "checksum_bandwidth": "checksums, one core",
    "read": "reads",
    "write": "writes",
    "sustained_write": "writes without a break",
}
_LARGE_SPREAD = 0.2
_BUSY_PART = 0.1
"""Of the cores. Beside programs that never rest all figures may be alike, and all wrong."""


def calibrate_to(output: Path | None, paths: Sequence[Path], *, as_json: bool) -> None:
    """Measure the machine, write its profile and print it.

    Raises
    ------
    ConfigError
        If the profile cannot be written, or something cannot be measured.
    """
    file = output or machine_file()
    _check_output(file, is_default=output is None)
    with _Bar() as bar:
        profile = calibrate(paths, progress=bar.measures)
    write_machine(file, profile)
    if as_json:
        print(file.read_text(encoding="utf-8"), end="")
        return
    console = Console()
    _show(console, profile)
    for line in _remarks(profile):
        console.print(line, highlight=False)
    console.print(f"profile written to {file}", highlight=False)


class _Bar:
    """What is measured, on a terminal. It has no thread of its own, which would disturb what is measured."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def measures(self, what: str, part: float) -> None:
        """Move on."""
        self._bar.update(self._task, description=what, completed=part, refresh=True)


def _check_output(file: Path, *, is_default: bool) -> None:
    """Found before measuring, not after it."""
    if file.suffix != ".json":
        raise ConfigError(f"a measured profile is JSON: name a file that ends in .json, not {file}")
    folder = file.absolute().parent
    if is_default:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {folder}: {error.strerror}. Name a file with --output.") from error
    if not folder.is_dir():
        raise ConfigError(f"cannot write the profile {file}: {folder} is not a folder")


def _show(console: Console, profile: MachineProfile) -> None:
    tables: dict[str, Table] = {}
    for name, spread in profile.spread.items():
        section, label = _labelled(profile, name)
        table = tables.setdefault(section, _new_table())
        style = "yellow" if spread > _LARGE_SPREAD else "dim"
        table.add_row("", label, _written(name, figure_of(profile, name)), Text(f"+-{50 * spread:.0f} %", style))
    for section, table in tables.items():
        console.print(Text(section, style="bold"))
        console.print(table)


def _new_table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=1)
    table.add_column(min_width=30)
    table.add_column(min_width=14, justify="right")
    table.add_column(min_width=7, justify="right")
    return table


def _labelled(profile: MachineProfile, name: str) -> tuple[str, str]:
    """The machine's part that a figure is of, and what it tells."""
    match name.split("."):
        case ["drives", number, "mixed", which, _]:
            drive = profile.drives[int(number)]
            return _drive(profile, number), f"reads and writes, {drive.mixed[int(which)].read_part:.0%} reads"
        case ["drives", number, field]:
            return _drive(profile, number), _WORDS[field]
        case ["device", field, dtype]:
            return f"device: {profile.device.name}", f"{_WORDS[field]}, {dtype}"
        case ["device", field]:
            return f"device: {profile.device.name}", _WORDS[field]
        case [_, field]:
            host = profile.host
            return f"host: {host.name}, {host.cores} cores, {format_bytes(host.memory)}", _WORDS[field]
        case _:
            raise InternalError(f"nothing is known of the figure {name}")


def _drive(profile: MachineProfile, number: str) -> str:
    drive = profile.drives[int(number)]
    free = "" if drive.space is None else f", {format_bytes(drive.space)} free"
    return f"drive: {drive.path} ({drive.name}){free}"


def _written(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return f"{value * 1e6:.2f} us"
    return format_rate(value, "FLOP" if "flops" in name else "B")


def _remarks(profile: MachineProfile) -> Iterator[str]:
    """What to do for a better profile."""
    if not profile.drives:
        yield "no drive was measured: name the folders of the nvme tier with --path"
    cores, busy = profile.host.cores, profile.busy_cores
    if busy > _BUSY_PART * cores:
        yield f"other programs kept {busy:.1f} of {cores} cores busy meanwhile: end them, then calibrate again"
    elif max(profile.spread.values(), default=0.0) > _LARGE_SPREAD:
        yield "some figures vary much: end what else uses this machine, then calibrate again"
