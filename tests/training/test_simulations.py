"""The simulated device and drive do what they are for: they let an order that is missing be seen."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
from support.simulated_accelerator import Copies, RaceError, SimulatedAccelerator, SimulatedRange
from support.simulated_engine import Fault, SimulatedEngine, Transfers

from zerooffload.aio.files import create_file, reserve_space
from zerooffload.errors import InternalError, TierIOError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zerooffload.aio import OpenFile

NBYTES = 8192
POISON = 0xFF


@pytest.fixture(params=Copies)
def accelerator(request: pytest.FixtureRequest) -> Iterator[SimulatedAccelerator]:
    device = SimulatedAccelerator(request.param)
    yield device
    device.close()


def filled(accelerator: SimulatedAccelerator) -> SimulatedRange:
    memory = accelerator.reserve(NBYTES)
    memory.fill()
    return memory


def host(value: int) -> torch.Tensor:
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor == POISON).all())


def test_memory_is_poison_when_filled_and_when_emptied(accelerator: SimulatedAccelerator) -> None:
    memory = filled(accelerator)
    assert is_poison(memory.tensor)
    memory.tensor.zero_()
    memory.empty()
    assert is_poison(memory.memory)
    assert memory.memory.view(torch.float32).isnan().all()
    assert memory.memory.view(torch.bfloat16).isnan().all()


def test_an_ordered_round_trip(accelerator: SimulatedAccelerator) -> None:
    memory, back = filled(accelerator), host(0)
    accelerator.copy(accelerator.copy_in, memory.tensor, host(7))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    memory.tensor.add_(1)
    accelerator.copy_out.wait(accelerator.record(accelerator.compute))
    accelerator.copy(accelerator.copy_out, back, memory.tensor)
    accelerator.record(accelerator.copy_out).wait()
    assert torch.equal(back, host(8))
    assert accelerator.num_spoiled == 0


def test_a_late_copy_runs_when_it_is_waited_for() -> None:
    accelerator = SimulatedAccelerator(Copies.LATE)
    memory, source = filled(accelerator), host(7)
    accelerator.copy(accelerator.copy_in, memory.tensor, source)
    event = accelerator.record(accelerator.copy_in)
    assert not event.done()
    assert is_poison(memory.tensor)
    source.fill_(9)
    with pytest.raises(RaceError, match="changed under a copy"):
        event.wait()
    assert event.done()
    assert torch.equal(memory.tensor, host(9))


def test_a_copy_to_the_host_may_overwrite_what_a_copy_before_it_has_read() -> None:
    """Compute is behind the one, and the other behind compute: the host need not know."""
    accelerator = SimulatedAccelerator(Copies.LATE)
    memory, home = filled(accelerator), host(7)
    accelerator.copy(accelerator.copy_in, memory.tensor, home)
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    memory.tensor.fill_(8)
    accelerator.copy_out.wait(accelerator.record(accelerator.compute))
    accelerator.copy(accelerator.copy_out, home, memory.tensor)
    accelerator.record(accelerator.copy_out).wait()
    assert torch.equal(home, host(8))
    accelerator.close()


def test_waiting_runs_what_was_enqueued_before_and_no_more() -> None:
    accelerator = SimulatedAccelerator(Copies.LATE)
    first, second, third = (filled(accelerator) for _ in range(3))
    accelerator.copy(accelerator.copy_in, first.tensor, host(1))
    accelerator.copy(accelerator.copy_in, second.tensor, host(2))
    event = accelerator.record(accelerator.copy_in)
    accelerator.copy(accelerator.copy_in, third.tensor, host(3))
    accelerator.compute.wait(event)
    assert torch.equal(first.tensor, host(1))
    assert torch.equal(second.tensor, host(2))
    assert is_poison(third.tensor)


def test_copy_out_sees_nothing_that_compute_wrote_after_the_point(accelerator: SimulatedAccelerator) -> None:
    memory, back = filled(accelerator), host(0)
    memory.tensor.fill_(1)
    accelerator.copy_out.wait(accelerator.record(accelerator.compute))
    memory.tensor.fill_(2)
    accelerator.copy(accelerator.copy_out, back, memory.tensor)
    accelerator.record(accelerator.copy_out).wait()
    assert is_poison(back)


def test_copy_out_without_any_order(accelerator: SimulatedAccelerator) -> None:
    memory, back = filled(accelerator), host(0)
    memory.tensor.fill_(1)
    accelerator.record(accelerator.compute)
    accelerator.copy(accelerator.copy_out, back, memory.tensor)
    accelerator.record(accelerator.copy_out).wait()
    assert is_poison(back)


def test_a_refill_must_be_behind_every_release(accelerator: SimulatedAccelerator) -> None:
    memory, other = filled(accelerator), filled(accelerator)
    early = accelerator.record(accelerator.compute)
    late = accelerator.record(accelerator.compute)
    other.empty()
    memory.empty()
    memory.fill()
    accelerator.copy_in.wait(early)
    accelerator.copy(accelerator.copy_in, memory.tensor, host(7))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    assert is_poison(memory.tensor)
    accelerator.copy_in.wait(late)
    accelerator.copy(accelerator.copy_in, memory.tensor, host(7))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    assert torch.equal(memory.tensor, host(7))


def test_memory_that_compute_uses_must_be_left_by_it_first(accelerator: SimulatedAccelerator) -> None:
    memory = filled(accelerator)
    memory.tensor.fill_(1)
    accelerator.record(accelerator.compute)
    accelerator.copy(accelerator.copy_in, memory.tensor, host(7))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    assert is_poison(memory.tensor)


def test_what_the_host_has_waited_for_needs_no_other_order(accelerator: SimulatedAccelerator) -> None:
    """Gradients that left: compute wrote them before the copy that the host has seen done."""
    memory, back = filled(accelerator), host(0)
    memory.tensor.fill_(1)
    accelerator.copy_out.wait(accelerator.record(accelerator.compute))
    accelerator.copy(accelerator.copy_out, back, memory.tensor)
    copied = accelerator.record(accelerator.copy_out)
    accelerator.record(accelerator.compute)
    copied.wait()
    memory.empty()
    memory.fill()
    accelerator.copy(accelerator.copy_in, memory.tensor, host(7))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    assert torch.equal(memory.tensor, host(7))


def test_misuse_of_memory() -> None:
    accelerator = SimulatedAccelerator(Copies.LATE)
    memory = filled(accelerator)
    accelerator.copy(accelerator.copy_in, memory.tensor, host(7))
    with pytest.raises(RaceError, match="while a copy into it had not run"):
        memory.empty()
    with pytest.raises(RaceError, match="filled again"):
        memory.fill()
    empty = accelerator.reserve(NBYTES)
    with pytest.raises(RaceError, match="empty range was emptied"):
        empty.empty()
    with pytest.raises(RaceError, match="not there"):
        _ = empty.tensor
    with pytest.raises(RaceError, match="into a range that is empty"):
        accelerator.copy(accelerator.copy_in, empty.memory, host(7))
    with pytest.raises(RaceError, match="out of a range that is empty"):
        accelerator.copy(accelerator.copy_out, host(7), empty.memory)
    with pytest.raises(RaceError, match="the other way"):
        accelerator.copy(accelerator.copy_out, memory.tensor, host(7))


def test_memory_is_counted_as_it_is_rounded() -> None:
    accelerator = SimulatedAccelerator(Copies.LATE, capacity_bytes=100_000)
    memory = filled(accelerator)
    assert memory.nbytes == accelerator.range_nbytes(NBYTES) == NBYTES + 512
    assert accelerator.available_bytes() == 100_000 - memory.nbytes
    memory.empty()
    assert accelerator.available_bytes() == 100_000
    assert accelerator.peak_filled_bytes == memory.nbytes


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    opened = create_file(tmp_path / "states.bin")
    reserve_space(opened, 4 * NBYTES)
    yield opened
    opened.close()


def pages(value: int) -> torch.Tensor:
    buffer = SimulatedAccelerator().host_buffer(NBYTES)
    return buffer.fill_(value)


@pytest.mark.parametrize("on_files", [False, True], ids=["in memory", "on files"])
@pytest.mark.parametrize("transfers", Transfers)
def test_written_bytes_are_read(transfers: Transfers, file: OpenFile, *, on_files: bool) -> None:
    engine, target = SimulatedEngine(transfers, on_files=on_files), pages(0)
    engine.submit_write(file, NBYTES, pages(7)).wait()
    engine.submit_read(file, NBYTES, target).wait()
    assert torch.equal(target, host(7))
    engine.close()


def test_a_lazy_read_comes_when_it_is_waited_for(file: OpenFile) -> None:
    engine, target = SimulatedEngine(), pages(0)
    engine.submit_write(file, 0, pages(7)).wait()
    ticket = engine.submit_read(file, 0, target)
    assert not ticket.done()
    assert is_poison(target)
    ticket.wait()
    assert torch.equal(target, host(7))


def test_a_lazy_write_takes_its_source_when_it_is_waited_for(file: OpenFile) -> None:
    engine, source, target = SimulatedEngine(), pages(7), pages(0)
    ticket = engine.submit_write(file, 0, source)
    engine.submit_read(file, 0, target).wait()
    assert is_poison(target)
    source.fill_(9)
    ticket.wait()
    engine.submit_read(file, 0, target).wait()
    assert torch.equal(target, host(9))


@pytest.mark.parametrize("transfers", Transfers)
def test_faults(transfers: Transfers, file: OpenFile) -> None:
    fault = Fault(at=1, operation="write", errno=errno.ENOSPC, transferred_bytes=4096)
    engine, target = SimulatedEngine(transfers, faults=[fault]), pages(0)
    engine.submit_write(file, 0, pages(1)).wait()
    ticket = engine.submit_write(file, 0, pages(2))
    for _ in range(2):
        with pytest.raises(TierIOError) as raised:
            ticket.wait()
        assert (raised.value.errno, raised.value.transferred_bytes) == (errno.ENOSPC, 4096)
    engine.submit_read(file, 0, target).wait()
    assert target[:4096].eq(2).all()
    assert target[4096:].eq(1).all()
    engine.close()


@pytest.mark.parametrize("on_files", [False, True], ids=["in memory", "on files"])
@pytest.mark.parametrize("transfers", Transfers)
def test_flushes_and_their_faults(transfers: Transfers, file: OpenFile, *, on_files: bool) -> None:
    engine = SimulatedEngine(transfers, on_files=on_files, faults=[Fault(at=1, operation="flush")])
    engine.submit_flush(file).wait()
    with pytest.raises(TierIOError) as raised:
        engine.submit_flush(file).wait()
    assert (raised.value.errno, raised.value.operation) == (errno.EIO, "flush")
    assert engine.num_operations["flush"] == 2
    engine.close()


def test_the_rules_of_direct_io(file: OpenFile) -> None:
    engine = SimulatedEngine()
    for offset_bytes, buffer in ((512, pages(0)), (0, pages(0)[512:]), (0, pages(0)[:512])):
        with pytest.raises(InternalError, match="not fit for direct I/O"):
            engine.submit_read(file, offset_bytes, buffer)
    engine.close()
    with pytest.raises(InternalError, match="closed"):
        engine.submit_read(file, 0, pages(0))
