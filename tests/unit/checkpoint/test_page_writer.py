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

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.checkpoint.page_writer import PageWriter
from zerooffload.errors import InternalError
from zerooffload.formats import MIB
from zerooffload.memory import Budget
from zerooffload.telemetry import Recorder, Waits
from zerooffload.tiers import StagingRing

BLOCK_BYTES = 16 << 10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerooffload.checkpoint.page_writer.BLOCK_BYTES", BLOCK_BYTES)


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
    content = torch.frombuffer(bytearray(draw.randbytes(sum(lengths) or 1)), dtype=torch.uint8)[: sum(lengths)]
    path = tmp_path_factory.mktemp("files") / "file"
    if before:
        path.write_bytes(b"\xff" * before)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    order = draw.sample(range(len(lengths)), len(lengths))
    with writer_of(path, content.numel()) as writer:
        for index in order:
            piece = content[starts[index] : starts[index] + lengths[index]]
            middle = draw.randint(0, piece.numel())
            found = writer.write(starts[index], [piece[:middle], piece[middle:]])
            assert found == xxhash.xxh3_64_hexdigest(piece.numpy().tobytes())
    assert path.read_bytes() == content.numpy().tobytes()


def test_a_file_that_lacks_bytes_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="5000 of 5001 bytes"), writer_of(tmp_path / "file", 5001) as writer:
        writer.write(0, [torch.ones(5000, dtype=torch.uint8)])
