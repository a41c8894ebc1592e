"""What every engine does alike."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from zerooffload import InternalError, TierIOError
from zerooffload.accelerator.pages import populated_pages
from zerooffload.aio import Engine, OpenFile

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 4096


def content(nbytes: int, seed: int) -> torch.Tensor:
    buffer = populated_pages(nbytes)
    generator = torch.Generator().manual_seed(seed)
    return buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))


@pytest.fixture
def file(new_file: Callable[[], OpenFile]) -> OpenFile:
    return new_file()


@pytest.mark.parametrize("nbytes", [BLOCK, 3 * BLOCK, 4 << 20])
@pytest.mark.parametrize("offset", [0, BLOCK, 5 * BLOCK])
def test_what_is_written_comes_back(engine: Engine, file: OpenFile, nbytes: int, offset: int) -> None:
    source, target = content(nbytes, 1), populated_pages(nbytes)
    engine.submit_write(file, offset, source).wait()
    engine.submit_read(file, offset, target).wait()
    assert torch.equal(source, target)
    assert file.path.stat().st_size == offset + nbytes


def test_a_write_changes_its_own_bytes_alone(engine: Engine, file: OpenFile) -> None:
    whole, part = content(4 * BLOCK, 1), content(BLOCK, 2)
    engine.submit_write(file, 0, whole).wait()
    engine.submit_write(file, 2 * BLOCK, part).wait()
    expected = whole.clone()
    expected[2 * BLOCK : 3 * BLOCK] = part
    assert file.path.read_bytes() == expected.numpy().tobytes()


def test_many_transfers_are_in_flight_at_the_same_time(engine: Engine, new_file: Callable[[], OpenFile]) -> None:
    files = [new_file(), new_file()]
    sources = [content(2 * BLOCK, seed) for seed in range(60)]
    places = [(files[number % 2], number * 2 * BLOCK) for number in range(60)]
    tickets = [engine.submit_write(*place, source) for place, source in zip(places, sources, strict=True)]
    for ticket in reversed(tickets):
        ticket.wait()
        assert ticket.done()
    targets = [populated_pages(2 * BLOCK) for _ in sources]
    tickets = [engine.submit_read(*place, target) for place, target in zip(places, targets, strict=True)]
    for ticket in tickets:
        ticket.wait()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


def test_a_ticket_keeps_its_buffer(engine: Engine, file: OpenFile) -> None:
    expected = content(1 << 20, 3).numpy().tobytes()
    ticket = engine.submit_write(file, 0, content(1 << 20, 3))
    gc.collect()
    ticket.wait()
    assert file.path.read_bytes() == expected


def test_waiting_again_for_a_finished_transfer_is_harmless(engine: Engine, file: OpenFile) -> None:
    ticket = engine.submit_write(file, 0, content(BLOCK, 1))
    ticket.wait()
    ticket.wait()
    assert ticket.done()


@pytest.mark.parametrize(("length", "there"), [(BLOCK, 0), (4 * BLOCK, BLOCK), (BLOCK, BLOCK // 2)])
def test_a_read_past_the_end_tells_errno_path_offset_and_lengths(
    engine: Engine, file: OpenFile, length: int, there: int
) -> None:
    os.ftruncate(file.fd, BLOCK + there)
    with pytest.raises(TierIOError) as caught:
        engine.submit_read(file, BLOCK, populated_pages(length)).wait()
    error = caught.value
    assert (error.errno, error.operation, error.path) == (errno.EIO, "read", str(file.path))
    assert (error.offset_bytes, error.length_bytes) == (BLOCK, length)
    assert error.transferred_bytes <= there
    if there % BLOCK == 0:
        assert error.transferred_bytes == there


def test_a_full_disk_is_told_with_its_errno(engine: Engine) -> None:
    full = OpenFile(Path("/dev/full"), os.open("/dev/full", os.O_RDWR | os.O_CLOEXEC), direct=False)
    try:
        with pytest.raises(TierIOError) as caught:
            engine.submit_write(full, 0, content(BLOCK, 1)).wait()
    finally:
        full.close()
    error = caught.value
    assert (error.errno, error.operation, error.path) == (errno.ENOSPC, "write", "/dev/full")
    assert (error.length_bytes, error.transferred_bytes) == (BLOCK, 0)


def test_a_flush_succeeds_before_and_after_writes_and_takes_no_place(engine: Engine, file: OpenFile) -> None:
    engine.submit_flush(file).wait()
    source = content(3 * BLOCK, 1)
    engine.submit_write(file, 0, source).wait()
    ticket = engine.submit_flush(file)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert file.path.read_bytes() == source.numpy().tobytes()


def test_a_flush_that_fails_tells_errno_and_path_in_every_wait(engine: Engine) -> None:
    reader, writer = os.pipe()
    try:
        # A pipe cannot be flushed.
        ticket = engine.submit_flush(OpenFile(Path("/pipe"), writer, direct=False))
        for _ in range(2):
            with pytest.raises(TierIOError) as caught:
                ticket.wait()
            error = caught.value
            assert (error.errno, error.operation, error.path) == (errno.EINVAL, "flush", "/pipe")
    finally:
        os.close(reader)
        os.close(writer)


def test_a_failed_transfer_leaves_the_others_alone(engine: Engine, file: OpenFile) -> None:
    source = content(BLOCK, 1)
    good = engine.submit_write(file, 0, source)
    bad = engine.submit_read(file, 1 << 30, populated_pages(BLOCK))
    also_good = engine.submit_write(file, BLOCK, source)
    with pytest.raises(TierIOError):
        bad.wait()
    good.wait()
    also_good.wait()
    assert file.path.read_bytes() == source.numpy().tobytes() * 2


def test_a_failure_is_raised_by_every_wait(engine: Engine, file: OpenFile) -> None:
    ticket = engine.submit_read(file, 0, populated_pages(BLOCK))
    for _ in range(2):
        with pytest.raises(TierIOError):
            ticket.wait()
    assert ticket.done()


def test_odd_offsets_and_lengths_work_on_buffered_files(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "buffered"
    buffered = OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), direct=False)
    try:
        source, target = content(1234, 4), torch.zeros(1000, dtype=torch.uint8)
        engine.submit_write(buffered, 77, source).wait()
        engine.submit_read(buffered, 100, target).wait()
    finally:
        buffered.close()
    assert torch.equal(target, source[23:1023])


def test_closing_finishes_what_was_submitted(engine: Engine, file: OpenFile) -> None:
    sources = [content(64 * BLOCK, seed) for seed in range(8)]
    for number, source in enumerate(sources):
        engine.submit_write(file, number * 64 * BLOCK, source)
    engine.close()
    assert file.path.read_bytes() == b"".join(source.numpy().tobytes() for source in sources)


def test_closing_again_is_harmless_and_a_closed_engine_takes_nothing(engine: Engine, file: OpenFile) -> None:
    engine.close()
    engine.close()
    with pytest.raises(InternalError, match="closed"):
        engine.submit_write(file, 0, content(BLOCK, 1))
    with pytest.raises(InternalError, match="closed"):
        engine.submit_flush(file)
