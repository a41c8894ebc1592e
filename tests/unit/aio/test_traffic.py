from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload.aio.traffic import Mix, Traffic
from zerooffload.formats import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from zerooffload.aio import OpenFile

FOREVER, NUM_TRANSFERS = 1e9, 24


class Noted:
    """An engine that notes what it is asked for, and lets time pass with each transfer that ends."""

    name = "noted"
    reads_devices = False

    def __init__(self) -> None:
        self.transfers: list[tuple[str, int]] = []
        self.num_flushes = 0
        self.in_flight: list[int] = []
        self.most_in_flight = 0
        self.seconds = 0.0

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> Noted.Ticket:  # noqa: ARG002
        return self._start("read", offset_bytes, target)

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> Noted.Ticket:  # noqa: ARG002
        return self._start("write", offset_bytes, source)

    def submit_flush(self, file: OpenFile) -> Noted.Ticket:  # noqa: ARG002
        assert not self.in_flight
        self.num_flushes += 1
        return Noted.Ticket(self, -1)

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002
        return False

    def close(self) -> None:
        pass

    def _start(self, what: str, offset_bytes: int, buffer: torch.Tensor) -> Noted.Ticket:
        assert buffer.data_ptr() not in self.in_flight, "a buffer under way was used again"
        assert buffer.numel() == MIB
        self.in_flight.append(buffer.data_ptr())
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.transfers.append((what, offset_bytes // MIB))
        return Noted.Ticket(self, buffer.data_ptr())

    class Ticket:
        def __init__(self, engine: Noted, address: int) -> None:
            self._engine = engine
            self._address = address

        def wait(self) -> None:
            if self._address >= 0:
                self._engine.in_flight.remove(self._address)
                self._engine.seconds += 1.0

        def done(self) -> bool:
            return False


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()
    monkeypatch.setattr("zerooffload.aio.traffic.time.perf_counter", lambda: noted.seconds)
    return noted


@pytest.fixture
def traffic(nvme: Path) -> Iterator[Traffic]:
    traffic = Traffic(nvme, 3, MIB)
    assert list(nvme.iterdir()) == []
    yield traffic
    traffic.close()


def test_every_extent_is_written_first(engine: Noted, traffic: Traffic) -> None:
    assert traffic.fill(engine, 8, FOREVER) == 8
    assert engine.transfers == [("write", extent) for extent in range(8)]
    assert (engine.most_in_flight, engine.in_flight) == (3, [])


def test_on_a_slow_drive_only_what_was_written_is_moved(engine: Noted, traffic: Traffic) -> None:
    # Each transfer takes a second; the fifth would begin behind the end.
    assert traffic.fill(engine, 8, 1.5) == 4
    engine.transfers.clear()
    traffic.move(engine, Mix(1, 1), NUM_TRANSFERS)
    assert {extent for _, extent in engine.transfers} == set(range(4))


@pytest.mark.parametrize(("reads", "writes"), [(1, 0), (0, 1), (1, 1), (1, 3), (3, 1), (4, 3)])
def test_a_mix_has_its_ratio_at_every_moment(engine: Noted, traffic: Traffic, reads: int, writes: int) -> None:
    traffic.fill(engine, 8, FOREVER)
    engine.transfers.clear()
    moved = traffic.move(engine, Mix(reads, writes), NUM_TRANSFERS)
    # And what was under way when the time was over.
    assert moved == len(engine.transfers) * MIB == (NUM_TRANSFERS + 3) * MIB
    assert engine.in_flight == []
    for end in range(1, len(engine.transfers) + 1):
        num_reads = sum(what == "read" for what, _ in engine.transfers[:end])
        assert num_reads == end * reads // (reads + writes)


def test_each_turn_goes_on_where_the_last_one_ended(engine: Noted, traffic: Traffic) -> None:
    traffic.fill(engine, 8, FOREVER)
    engine.transfers.clear()
    for _ in range(5):
        traffic.move(engine, Mix(1, 0), 1.0)
    extents = [extent for _, extent in engine.transfers]
    assert extents == [number % 8 for number in range(len(extents))]
    assert len(extents) > 8


def test_a_flush_comes_behind_the_writes(engine: Noted, traffic: Traffic) -> None:
    traffic.fill(engine, 8, FOREVER)
    traffic.flush(engine)
    assert engine.num_flushes == 1


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Traffic(tmp_path / "missing", 3, MIB)
