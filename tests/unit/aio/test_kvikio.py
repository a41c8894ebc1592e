"""Reads through kvikio, with a module in its place: this is about what we make of it."""

from __future__ import annotations

import errno
import logging
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from support.simulated_accelerator import SimulatedAccelerator
from support.stand_in_kvikio import StandIn

from zerooffload import ConfigError, TierIOError
from zerooffload.accelerator import Accelerator, populated_pages
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import ChosenEngine, OpenFile, choose_engine, device_reads
from zerooffload.aio.kvikio_engine import DeviceReader, KvikioEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK = 4096


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Installed."""
    module = StandIn()
    monkeypatch.setitem(sys.modules, "kvikio", module)
    yield module
    module.close()
    assert module.open_files == []


@pytest.fixture
def content() -> torch.Tensor:
    return populated_pages(8 * BLOCK).random_(generator=torch.Generator().manual_seed(1))


@pytest.fixture
def file(new_file: Callable[[], OpenFile], content: torch.Tensor) -> OpenFile:
    """With the content."""
    file = new_file()
    engine = choose_engine("aiofiles").engine
    engine.submit_write(file, 0, content).wait()
    engine.close()
    return file


@pytest.fixture
def reader(kvikio: StandIn) -> Iterator[DeviceReader]:
    reader = DeviceReader(kvikio)
    yield reader
    reader.close()


def choose(name: str, folder: Path, device: Accelerator | None) -> ChosenEngine:
    """With its engine closed."""
    chosen = choose_engine(name, folder, device=device)
    chosen.engine.close()
    return chosen


@pytest.mark.parametrize("most_bytes", [1 << 30, 3 * BLOCK, 1000])
def test_all_bytes_come_however_short_the_reads_are(
    reader: DeviceReader, kvikio: StandIn, file: OpenFile, content: torch.Tensor, most_bytes: int
) -> None:
    kvikio.most_bytes = most_bytes
    target = torch.empty(4 * BLOCK, dtype=torch.uint8)
    ticket = reader.submit_read(file, 2 * BLOCK, target)
    ticket.wait()
    assert ticket.done()
    assert torch.equal(target, content[2 * BLOCK : 6 * BLOCK])
    assert kvikio.num_reads == -(-4 * BLOCK // most_bytes)


def test_the_file_is_opened_once(reader: DeviceReader, kvikio: StandIn, file: OpenFile) -> None:
    for _ in range(3):
        reader.submit_read(file, 0, torch.empty(BLOCK, dtype=torch.uint8)).wait()
    assert kvikio.open_files == [file.path]


def test_a_read_beyond_the_end_fails(reader: DeviceReader, file: OpenFile) -> None:
    ticket = reader.submit_read(file, 7 * BLOCK, torch.empty(2 * BLOCK, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(TierIOError, match="end of file") as failure:
            ticket.wait()
        assert (failure.value.errno, failure.value.transferred_bytes) == (errno.EIO, BLOCK)


@pytest.mark.parametrize("how", ["error", "refuses"])
def test_what_kvikio_says_is_told(reader: DeviceReader, kvikio: StandIn, file: OpenFile, how: str) -> None:
    setattr(kvikio, how, "GPU page fault")
    with pytest.raises(TierIOError, match="kvikio says: GPU page fault") as failure:
        reader.submit_read(file, BLOCK, torch.empty(BLOCK, dtype=torch.uint8)).wait()
    assert failure.value.path == str(file.path)
    assert (failure.value.operation, failure.value.offset_bytes) == ("read", BLOCK)


def test_a_read_that_takes_long_is_told(
    reader: DeviceReader, kvikio: StandIn, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            kvikio.goes_on.set()

    told: list[str] = []
    log, handler = logging.getLogger("zerooffload"), Told()
    log.addHandler(handler)
    try:
        kvikio.goes_on.clear()
        ticket = reader.submit_read(file, 0, torch.empty(BLOCK, dtype=torch.uint8))
        assert not ticket.done()
        monkeypatch.setattr(ticket, "slow_after_seconds", 0.01)
        ticket.wait()
    finally:
        log.removeHandler(handler)
    assert f"read of {BLOCK} bytes at offset 0 of {file.path}" in told[0]


def test_closing_finishes_what_is_under_way(kvikio: StandIn, file: OpenFile, content: torch.Tensor) -> None:
    reader, target = DeviceReader(kvikio), torch.empty(BLOCK, dtype=torch.uint8)
    kvikio.goes_on.clear()
    ticket = reader.submit_read(file, 0, target)
    assert not ticket.done()
    kvikio.goes_on.set()
    reader.close()
    assert torch.equal(target, content[:BLOCK])
    reader.close()


def test_the_engine_hands_on_what_is_the_hosts(kvikio: StandIn, file: OpenFile, content: torch.Tensor) -> None:
    engine = KvikioEngine(choose_engine("aiofiles").engine, DeviceReader(kvikio))
    target = populated_pages(BLOCK)
    engine.submit_read(file, BLOCK, target).wait()
    assert torch.equal(target, content[BLOCK : 2 * BLOCK])
    engine.submit_write(file, 0, target).wait()
    engine.submit_flush(file).wait()
    assert not engine.register(target)
    assert kvikio.num_reads == 0
    engine.close()


def test_it_is_taken_where_it_is_faster(kvikio: StandIn, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is measured, whichever that is here."""
    for faster, is_taken in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(device_reads, "_FASTER", faster)
        chosen = choose("auto", nvme, SimulatedAccelerator())
        assert (chosen.engine.name == "kvikio") == chosen.engine.reads_devices == is_taken
        assert "straight, through kvikio" in chosen.reason
    assert kvikio.num_reads > 0
    assert list(nvme.iterdir()) == []


def test_by_name_it_is_taken_also_where_it_is_not(kvikio: StandIn, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reads, "_FASTER", 1e9)
    assert choose("kvikio", nvme, SimulatedAccelerator()).engine.name == "kvikio"
    assert kvikio.num_reads > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"change": lambda part: part[7:8].add_(1)}, "other bytes"),
        ({"error": "not supported"}, "kvikio says: not supported"),
        ({"refuses": "libcufile.so.0"}, "kvikio says: libcufile.so.0"),
        ({"CuFile": "another release"}, "not callable"),
    ],
    ids=["wrong bytes", "errors", "no file", "other names"],
)
def test_where_it_does_not_work_another_is_taken_unless_it_was_forced(
    kvikio: StandIn, nvme: Path, change: dict[str, object], words: str
) -> None:
    for name, value in change.items():
        setattr(kvikio, name, value)
    assert choose("auto", nvme, SimulatedAccelerator()).engine.name != "kvikio"
    with pytest.raises(ConfigError, match=rf"'kvikio' was forced.*{words}.*Use 'auto' or 'threads' or 'aiofiles'"):
        choose_engine("kvikio", nvme, device=SimulatedAccelerator())
    assert list(nvme.iterdir()) == []


def test_where_it_is_not_installed_nothing_is_said_unless_it_was_forced(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "kvikio" not in choose("auto", nvme, SimulatedAccelerator()).reason
    with pytest.raises(ConfigError, match=r"'kvikio' was forced.*kvikio"):
        choose_engine("kvikio", nvme, device=SimulatedAccelerator())


def test_a_cpu_has_no_memory_of_its_own(kvikio: StandIn, nvme: Path) -> None:
    assert choose("auto", nvme, CpuAccelerator()).engine.name != "kvikio"
    with pytest.raises(ConfigError, match="cpu has no memory of its own to read into"):
        choose_engine("kvikio", nvme, device=CpuAccelerator())
    # Files that no device reads, as a checkpoint's.
    assert choose("kvikio", nvme, None).engine.name != "kvikio"
    assert kvikio.num_reads == 0
