"""The native engines on real files, with and without O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

n = pytest.importorskip("zerooffload._native")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20


def uring_engine() -> n.UringEngine:
    try:
        return n.UringEngine(8, MIB)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


ENGINES = {"threads": lambda: n.ThreadEngine(3), "uring": uring_engine}


@pytest.fixture(params=ENGINES)
def new_engine(request: pytest.FixtureRequest) -> Callable[[], n.Engine]:
    return ENGINES[request.param]


@pytest.fixture
def engine(new_engine: Callable[[], n.Engine]) -> Iterator[n.Engine]:
    engine = new_engine()
    yield engine
    engine.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def direct_fd(tmp_path: Path) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    yield fd
    os.close(fd)


def page_aligned(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    data = page_aligned(nbytes)
    data[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return data


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="num_threads: expected at least 1, got 0"):
        n.ThreadEngine(0)
    with pytest.raises(ValueError, match="num_entries: expected 1 to 4096, got 0"):
        n.UringEngine(0, MIB)
    with pytest.raises(ValueError, match="piece_nbytes: expected a multiple of 4096 up to 2\\^30, got 5000"):
        n.ThreadEngine(1, 5000)


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 2 * MIB, 9 * MIB + 77])
def test_write_and_read_back(engine: n.Engine, fd: int, nbytes: int) -> None:
    source, target = noise(nbytes), page_aligned(nbytes)
    engine.wait(engine.submit_write(fd, 13, source.ctypes.data, nbytes))
    engine.wait(engine.submit_read(fd, 13, target.ctypes.data, nbytes))
    assert np.array_equal(source, target)


def test_o_direct(engine: n.Engine, direct_fd: int) -> None:
    nbytes = 7 * MIB + 4096
    source, target = noise(nbytes), page_aligned(nbytes)
    os.posix_fallocate(direct_fd, 0, 8192 + nbytes)
    engine.wait(engine.submit_write(direct_fd, 8192, source.ctypes.data, nbytes))
    engine.wait(engine.submit_read(direct_fd, 8192, target.ctypes.data, nbytes))
    assert np.array_equal(source, target)


def test_an_unaligned_o_direct_request_ends_as_the_kernel_says(engine: n.Engine, direct_fd: int) -> None:
    """Some file systems refuse it with EINVAL, others go through the page cache."""
    source, target = noise(MIB), page_aligned(MIB)
    engine.wait(engine.submit_write(direct_fd, 0, source.ctypes.data, MIB))
    expected_errno = 0
    try:
        os.preadv(direct_fd, [page_aligned(4096)], 100)
    except OSError as error:
        expected_errno = error.errno or 0
    ticket = engine.submit_read(direct_fd, 100, target.ctypes.data, 4096)
    if expected_errno == 0:
        engine.wait(ticket)
        assert np.array_equal(target[:4096], source[100:4196])
        return
    with pytest.raises(n.IoFailure) as caught:
        engine.wait(ticket)
    assert caught.value.errno == expected_errno
    assert caught.value.transferred == 0


def test_many_outstanding_tickets(engine: n.Engine, fd: int) -> None:
    nbytes, count = 30_000, 400
    source, target = noise(nbytes * count), page_aligned(nbytes * count)
    order = list(range(count))
    shuffle = np.random.default_rng(1).shuffle
    for submit, data in ((engine.submit_write, source), (engine.submit_read, target)):
        shuffle(order)
        tickets = [submit(fd, i * nbytes, data.ctypes.data + i * nbytes, nbytes) for i in order]
        assert len(set(tickets)) == count
        shuffle(tickets)
        for ticket in tickets:
            engine.wait(ticket)
    assert np.array_equal(source, target)


def test_nothing_is_moved_for_an_empty_request(engine: n.Engine) -> None:
    engine.wait(engine.submit_read(-1, 0, 0, 0))


def test_a_failure_carries_what_is_known(engine: n.Engine) -> None:
    data = page_aligned(5 * MIB)
    ticket = engine.submit_write(999_999, 4096, data.ctypes.data, data.nbytes)
    with pytest.raises(n.IoFailure) as caught:
        engine.wait(ticket)
    failure = caught.value
    assert (failure.errno, failure.op, failure.fd) == (errno.EBADF, "write", 999_999)
    assert (failure.offset, failure.length, failure.transferred) == (4096, 5 * MIB, 0)
    assert str(failure) == (
        f"write of {5 * MIB} bytes at offset 4096 of file descriptor 999999 failed after 0 bytes: Bad file descriptor"
    )
    copy = pickle.loads(pickle.dumps(failure))  # noqa: S301 - our own bytes: ranks send errors to each other
    assert vars(copy) == vars(failure)


def test_a_read_only_file_is_not_written(engine: n.Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    data = page_aligned(100)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(n.IoFailure) as caught:
            engine.wait(engine.submit_write(fd, 0, data.ctypes.data, 100))
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("length", [0, 1000, 2 * MIB, 5 * MIB + 7])
def test_a_read_past_the_end_of_the_file(engine: n.Engine, fd: int, length: int) -> None:
    source, target = noise(length + 1), page_aligned(6 * MIB)
    os.pwrite(fd, source[:length].tobytes(), 0)
    with pytest.raises(n.IoFailure, match="unexpected end of file") as caught:
        engine.wait(engine.submit_read(fd, 0, target.ctypes.data, target.nbytes))
    assert caught.value.errno == errno.EIO
    assert caught.value.transferred == length
    assert np.array_equal(target[:length], source[:length])


def test_a_full_device(engine: n.Engine) -> None:
    """/dev/full answers every write with ENOSPC."""
    data = page_aligned(5 * MIB)
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(n.IoFailure) as caught:
            engine.wait(engine.submit_write(fd, 0, data.ctypes.data, data.nbytes))
    finally:
        os.close(fd)
    assert caught.value.errno == errno.ENOSPC


def test_a_ticket_is_waited_for_once(engine: n.Engine, fd: int) -> None:
    data = page_aligned(100)
    ticket = engine.submit_write(fd, 0, data.ctypes.data, 100)
    engine.wait(ticket)
    for use in (engine.wait, engine.done):
        with pytest.raises(KeyError, match=f"ticket {ticket} was never given out or was waited for"):
            use(ticket)
        with pytest.raises(KeyError):
            use(12345)


def test_a_failed_ticket_is_waited_for_once(engine: n.Engine) -> None:
    data = page_aligned(100)
    ticket = engine.submit_read(-1, 0, data.ctypes.data, 100)
    with pytest.raises(n.IoFailure):
        engine.wait(ticket)
    with pytest.raises(KeyError):
        engine.wait(ticket)


def test_close(engine: n.Engine, fd: int) -> None:
    source = noise(20 * MIB)
    ticket = engine.submit_write(fd, 0, source.ctypes.data, source.nbytes)
    engine.close()
    assert engine.done(ticket)
    engine.close()
    engine.wait(ticket)
    assert os.pread(fd, source.nbytes, 0) == source.tobytes()
    with pytest.raises(RuntimeError, match="this I/O engine is closed"):
        engine.submit_write(fd, 0, source.ctypes.data, source.nbytes)


def test_dropping_an_engine_finishes_its_work(new_engine: Callable[[], n.Engine], fd: int) -> None:
    engine = new_engine()
    source = noise(8 * MIB)
    engine.submit_write(fd, 0, source.ctypes.data, source.nbytes)
    del engine
    assert os.pread(fd, source.nbytes, 0) == source.tobytes()


def test_what_cannot_be_read_at_an_offset() -> None:
    """io_uring would wait for the pipe's data; nobody has asked for that yet."""
    engine = n.ThreadEngine(1)
    reader, writer = os.pipe()
    data = page_aligned(100)
    try:
        with pytest.raises(n.IoFailure) as caught:
            engine.wait(engine.submit_read(reader, 0, data.ctypes.data, 100))
    finally:
        engine.close()
        os.close(reader)
        os.close(writer)
    assert caught.value.errno == errno.ESPIPE


def test_wait_for_a_time(engine: n.Engine, fd: int) -> None:
    source = noise(4 * MIB)
    ticket = engine.submit_write(fd, 0, source.ctypes.data, source.nbytes)
    while engine.wait(ticket, 0.0) is None:
        pass
    with pytest.raises(KeyError):
        engine.wait(ticket, 0.0)


def test_wait_tells_when_the_transfer_was_over_and_not_when_it_was_asked(engine: n.Engine, fd: int) -> None:
    source = noise(4 * MIB)
    before = time.perf_counter()
    ticket = engine.submit_write(fd, 0, source.ctypes.data, source.nbytes)
    while not engine.done(ticket):
        pass
    after = time.perf_counter()
    ended = engine.wait(ticket)
    assert ended is not None
    assert before <= ended <= after


def test_registering_memory(engine: n.Engine, fd: int) -> None:
    source, target = noise(3 * MIB), page_aligned(3 * MIB)
    assert engine.register_memory(source.ctypes.data, MIB) in (0, errno.EOPNOTSUPP, errno.ENOMEM, errno.EINVAL)
    assert engine.register_memory(0, MIB) != 0
    engine.wait(engine.submit_write(fd, 0, source.ctypes.data, source.nbytes))
    engine.wait(engine.submit_read(fd, 0, target.ctypes.data, target.nbytes))
    assert np.array_equal(source, target)


def test_wait_from_another_thread(engine: n.Engine, fd: int) -> None:
    source = noise(4 * MIB)
    ticket = engine.submit_write(fd, 0, source.ctypes.data, source.nbytes)
    thread = threading.Thread(target=engine.wait, args=(ticket,))
    thread.start()
    thread.join()
    with pytest.raises(KeyError):
        engine.wait(ticket)


def test_a_signal_interrupts_waiting_but_not_the_transfer(engine: n.Engine) -> None:
    """Ctrl-C must be answered while a slow disk is not; the ticket can still be waited for."""

    class Interrupted(Exception):  # noqa: N818 - stands for KeyboardInterrupt
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    target = page_aligned(64 * MIB)
    fd = os.open("/dev/zero", os.O_RDONLY)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Half a second and more of work, all into one buffer: each request writes the same zeros.
        tickets = [engine.submit_read(fd, 0, target.ctypes.data, target.nbytes) for _ in range(128)]
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupted):
            engine.wait(tickets[-1])
        for ticket in tickets:
            engine.wait(ticket)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        engine.close()
        os.close(fd)
