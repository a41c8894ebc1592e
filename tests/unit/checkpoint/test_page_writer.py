"""Files written in any order, in whole pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_engine import SimulatedEngine, Transfers

from zerooffload.accelerator import populated_pages
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import OpenFile
from zerooffload.checkpoint.page_writer import PAGE_BYTES, PageWriter
from zerooffload.errors import InternalError
from zerooffload.formats import MIB
from zerooffload.memory import Budget
from zerooffload.telemetry import Recorder, Waitable, Waits
from zerooffload.tiers import StagingRing

BLOCK_BYTES = 16 << 10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerooffload.checkpoint.page_writer.BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("zerooffload.checkpoint.page_writer.LEAST_IN_PLACE_BYTES", 2 * PAGE_BYTES)


def in_pages(content: bytes) -> torch.Tensor:
    """In memory that starts with a page."""
    memory = populated_pages(max(len(content), 1))[: len(content)]
    memory.numpy()[:] = bytearray(content)
    return memory


@contextmanager
def writer_of(path: Path, nbytes: int) -> Iterator[PageWriter]:
    """Whose writes happen as late as they may."""
    engine, waits = SimulatedEngine(Transfers.LAZY, on_files=True), Waits(Recorder())
    ring = StagingRing("writes", 2, BLOCK_BYTES, Budget("host", MIB), CpuAccelerator())
    writer = PageWriter(path, nbytes, engine, ring, waits)
    try:
        yield writer
        ring.drain(waits)
        writer.finish()
    finally:
        writer.close()
        ring.close()
        engine.close()


@given(
    lengths=st.lists(st.integers(0, 3 * BLOCK_BYTES) | st.integers(0, 40), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    before=st.sampled_from([0, 100, 30 * BLOCK_BYTES]),
)
def test_the_file_is_what_was_written_whatever_the_order(
    lengths: list[int], seed: int, before: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(seed)  # noqa: S311 - the same order every time
    content = in_pages(draw.randbytes(sum(lengths)))
    path = tmp_path_factory.mktemp("files") / "file"
    if before:
        path.write_bytes(b"\xff" * before)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    order = draw.sample(range(len(lengths)), len(lengths))
    with writer_of(path, content.numel()) as writer:
        for index in order:
            piece = content[starts[index] : starts[index] + lengths[index]]
            middle = draw.randint(0, piece.numel())
            written = writer.write(starts[index], [piece[:middle], piece[middle:]])
            assert written.checksum == xxhash.xxh3_64_hexdigest(piece.numpy().tobytes())
            for item in written.leaving:
                item.wait()
    assert path.read_bytes() == content.numpy().tobytes()


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((0, 0, 2 * PAGE_BYTES), [2 * PAGE_BYTES]),
        ((0, 0, 2 * PAGE_BYTES - 1), []),
        ((0, 0, 9 * PAGE_BYTES + 100), [9 * PAGE_BYTES]),
        ((100, 100, 9 * PAGE_BYTES), [8 * PAGE_BYTES]),
        ((PAGE_BYTES, 0, 2 * PAGE_BYTES), [2 * PAGE_BYTES]),
        ((100, 0, 9 * PAGE_BYTES), []),
        ((0, 64, 9 * PAGE_BYTES), []),
    ],
)
def test_what_lies_in_memory_as_in_the_file_is_written_from_there(
    place: tuple[int, int, int], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, lead, nbytes = place
    memory = in_pages(bytes(range(256)) * 160)
    submit, in_place = SimulatedEngine.submit_write, []

    def watch(engine: SimulatedEngine, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> Waitable:
        if 0 <= source.data_ptr() - memory.data_ptr() < memory.numel():
            in_place.append(source.numel())
        return submit(engine, file, offset_bytes, source)

    monkeypatch.setattr(SimulatedEngine, "submit_write", watch)
    with writer_of(tmp_path / "file", start + nbytes) as writer:
        writer.write(0, [torch.zeros(start, dtype=torch.uint8)])
        source = memory[lead : lead + nbytes]
        leaving = writer.write(start, [source]).leaving
        assert in_place == expected
        assert len(leaving) == len(expected)
        for item in leaving:
            item.wait()
    assert (tmp_path / "file").read_bytes()[start:] == source.numpy().tobytes()


def test_a_file_that_lacks_bytes_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="5000 of 5001 bytes"), writer_of(tmp_path / "file", 5001) as writer:
        writer.write(0, [torch.ones(5000, dtype=torch.uint8)])
