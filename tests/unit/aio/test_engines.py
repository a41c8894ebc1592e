"""What every engine does alike."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerooffload import InternalError, TierIOError
from zerooffload.accelerator.pages import populated_pages
from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.threads import ThreadsEngine
from zerooffload.formats import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 4096


def content(nbytes: int, seed: int) -> torch.Tensor:
    buffer = populated_pages(nbytes)
    generator = torch.Generator().manual_seed(seed)
    return buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))


@pytest.fixture
def file(new_file: Callable[[], OpenFile]) -> OpenFile:
    return new_file()


@pytest.fixture
def buffered(tmp_path: Path) -> Iterator[OpenFile]:
    """A file on which offsets and lengths may be odd."""
    path = tmp_path / "buffered"
    file = OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), direct=False)
    yield file
    file.close()


@pytest.mark.parametrize("nbytes", [BLOCK, 3 * BLOCK, 4 << 20])
@pytest.mark.parametrize("offset", [0, BLOCK, 5 * BLOCK])
def test_what_is_written_comes_back(engine: Engine, file: OpenFile, nbytes: int, offset: int) -> None:
    source, target = content(nbytes, 1), populated_pages(nbytes)
    engine.submit_write(file, offset, source).wait()
    engine.submit_read(file, offset, target).wait()
    assert torch.equal(source, target)
    assert file.path.stat().st_size == offset + nbytes


def test_a_ticket_tells_when_its_transfer_was_over_however_late_it_is_waited_for(
    engine: Engine, file: OpenFile
) -> None:
    before = time.perf_counter()
    ticket = engine.submit_write(file, 0, content(4 << 20, 1))
    assert ticket.ended_seconds is None
    while not ticket.done():
        pass
    after = time.perf_counter()
    ticket.wait()
    assert before <= ticket.ended_seconds <= after


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


def test_a_ticket_whose_wait_is_just_ending_on_another_thread_is_done(file: OpenFile) -> None:
    engine = ThreadsEngine()
    ticket = engine.submit_write(file, 0, content(BLOCK, 1))
    assert ticket._engine.wait(ticket._number, 60.0) is not None
    assert ticket.done()
    engine.close()


def test_several_threads_submit_and_wait(engine: Engine, file: OpenFile) -> None:
    def use(number: int) -> bool:
        source, target = content(5 * BLOCK, number), populated_pages(5 * BLOCK)
        engine.submit_write(file, number * 5 * BLOCK, source).wait()
        engine.submit_flush(file).wait()
        engine.submit_read(file, number * 5 * BLOCK, target).wait()
        return torch.equal(source, target)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(40)))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 60_000), max_size=12),
    st.lists(st.integers(0, 60_000), max_size=12),
    st.randoms(use_true_random=False),
)
def test_however_a_file_is_cut_its_bytes_are_the_same(
    engine: Engine, buffered: OpenFile, writes: list[int], reads: list[int], shuffled: random.Random
) -> None:
    source, target = content(60_000, 1), torch.zeros(60_000, dtype=torch.uint8)
    for cuts, submit, buffer in ((writes, engine.submit_write, source), (reads, engine.submit_read, target)):
        parts = list(pairwise(sorted([0, *cuts, 60_000])))
        shuffled.shuffle(parts)
        for ticket in [submit(buffered, start, buffer[start:end]) for start, end in parts]:
            ticket.wait()
    assert torch.equal(source, target)


def test_registered_memory_and_what_lies_across_its_end(engine: Engine, file: OpenFile) -> None:
    source, target = content(3 * MIB, 1), populated_pages(3 * MIB)
    # Advice alone: that all works is what counts, whatever the answer.
    assert engine.register(source[:MIB]) in (True, False)
    assert engine.register(target[MIB:]) in (True, False)
    engine.submit_write(file, 0, source).wait()
    for start in range(0, 3 * MIB, 3 * MIB // 4):
        engine.submit_read(file, start, target[start : start + 3 * MIB // 4]).wait()
    assert torch.equal(source, target)


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


def test_a_failing_device_is_told_with_its_errno(engine: Engine) -> None:
    # Nothing is mapped at address 0.
    memory = OpenFile(Path("/proc/self/mem"), os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC), direct=False)
    try:
        with pytest.raises(TierIOError) as caught:
            engine.submit_read(memory, 0, populated_pages(2 * BLOCK)).wait()
    finally:
        memory.close()
    error = caught.value
    assert (error.errno, error.operation, error.transferred_bytes) == (errno.EIO, "read", 0)


def test_a_short_write_is_continued_and_how_far_it_came_is_told(engine: Engine, file: OpenFile) -> None:
    source = content(6 * BLOCK, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Two blocks fit below the limit; for the rest there is an errno.
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, limits[1]))
    try:
        with pytest.raises(TierIOError) as caught:
            engine.submit_write(file, 64 * MIB - 2 * BLOCK, source).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = caught.value
    assert (error.errno, error.operation) == (errno.EFBIG, "write")
    assert (error.length_bytes, error.transferred_bytes) == (6 * BLOCK, 2 * BLOCK)
    with file.path.open("rb") as stream:
        stream.seek(64 * MIB - 2 * BLOCK)
        assert stream.read() == source[: 2 * BLOCK].numpy().tobytes()


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


def test_odd_offsets_and_lengths_work_on_buffered_files(engine: Engine, buffered: OpenFile) -> None:
    source, target = content(1234, 4), torch.zeros(1000, dtype=torch.uint8)
    engine.submit_write(buffered, 77, source).wait()
    engine.submit_read(buffered, 100, target).wait()
    assert torch.equal(target, source[23:1023])


def test_nothing_is_a_transfer_too(engine: Engine, file: OpenFile) -> None:
    empty = populated_pages(BLOCK)[:0]
    engine.submit_write(file, 0, empty).wait()
    engine.submit_read(file, 0, empty).wait()


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
    with pytest.raises(InternalError, match="closed"):
        engine.register(content(BLOCK, 1))


def test_tickets_outlive_the_engine(engine: Engine, file: OpenFile) -> None:
    good, bad = engine.submit_write(file, 0, content(BLOCK, 1)), engine.submit_read(file, MIB, content(BLOCK, 1))
    engine.close()
    assert good.done()
    good.wait()
    with pytest.raises(TierIOError):
        bad.wait()


def test_a_forked_child_is_refused_and_leaves_the_engine_alone(engine: Engine, file: OpenFile) -> None:
    source = content(BLOCK, 1)
    ticket = engine.submit_write(file, 0, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads
        child = os.fork()
    if child == 0:
        refused = 0
        for use in (ticket.wait, lambda: engine.submit_flush(file), lambda: engine.register(source)):
            try:
                use()
            except InternalError as error:
                refused += "belongs to process" in str(error)
        engine.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    ticket.wait()
    engine.submit_flush(file).wait()
