"""What `CudaAccelerator` promises: memory that comes and goes under valid tensors, and queues that keep their order."""

from __future__ import annotations

import time

import pytest
import torch

from zerooffload.accelerator import Accelerator, cuda, populated_pages
from zerooffload.accelerator.cuda import CudaAccelerator
from zerooffload.formats import MIB

NBYTES = 8 * MIB
# About 0.05 s on a GPU of 1 to 2 GHz: long enough for the host to run far ahead.
SPIN_CYCLES = 100_000_000


@pytest.fixture
def accelerator() -> Accelerator:
    return CudaAccelerator(torch.device("cuda:0"))


def spin(accelerator: CudaAccelerator, stream: str) -> None:
    """Keep a queue busy."""
    with torch.cuda.stream(getattr(accelerator, stream).native()):
        torch.cuda._sleep(SPIN_CYCLES)


def test_tensors_stay_valid_over_empty_and_refill(accelerator: CudaAccelerator) -> None:
    memory = accelerator.reserve(NBYTES)
    # A view is only to be had of memory that is there.
    memory.fill()
    view = memory.tensor.view(torch.float32).view(1024, -1)
    saved = view.t()
    memory.empty()
    assert memory.tensor.untyped_storage().nbytes() == 0
    for value in (1.0, 2.0):
        memory.fill()
        source = torch.full((NBYTES // 4,), value).view(torch.uint8)
        accelerator.copy_in.wait(accelerator.record(accelerator.compute))
        accelerator.copy(accelerator.copy_in, memory.tensor, source)
        accelerator.compute.wait(accelerator.record(accelerator.copy_in))
        assert bool((view == value).all())
        assert bool((saved == value).all())
        memory.empty()
        assert memory.tensor.untyped_storage().nbytes() == 0


def test_an_empty_range_takes_no_memory(accelerator: CudaAccelerator) -> None:
    before = torch.cuda.memory_allocated()
    memory = accelerator.reserve(NBYTES)
    assert torch.cuda.memory_allocated() == before
    memory.fill()
    assert torch.cuda.memory_allocated() - before == memory.nbytes == accelerator.range_nbytes(NBYTES)
    memory.empty()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, MIB, 9 * MIB + 1, 10 * MIB, 10 * MIB + 1, 33 * MIB + 7])
def test_the_allocators_rounding(accelerator: CudaAccelerator, nbytes: int) -> None:
    """What is leased is what the allocator hands out, but for the tails that it may leave on a block."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    memory = accelerator.reserve(nbytes)
    memory.fill()
    assert nbytes <= torch.cuda.memory_allocated() - before <= memory.nbytes
    memory.empty()


def test_copy_out_is_behind_compute(accelerator: CudaAccelerator) -> None:
    memory = accelerator.reserve(NBYTES)
    memory.fill()
    target = accelerator.host_buffer(NBYTES)
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    spin(accelerator, "compute")
    memory.tensor.fill_(7)
    accelerator.copy_out.wait(accelerator.record(accelerator.compute))
    accelerator.copy(accelerator.copy_out, target, memory.tensor)
    event = accelerator.record(accelerator.copy_out)
    assert not event.done()
    event.wait()
    assert event.done()
    assert bool((target == 7).all())


def test_compute_is_behind_copy_in(accelerator: CudaAccelerator) -> None:
    memory = accelerator.reserve(NBYTES)
    memory.fill()
    source = accelerator.host_buffer(NBYTES).fill_(7)
    spin(accelerator, "copy_in")
    accelerator.copy(accelerator.copy_in, memory.tensor, source)
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    assert bool((memory.tensor == 7).all())


def test_a_refill_of_other_memory_is_behind_compute(accelerator: CudaAccelerator) -> None:
    """The allocator gives the block of one range to the next; what compute still reads must not be overwritten."""
    torch.cuda.empty_cache()
    first, second = accelerator.reserve(NBYTES), accelerator.reserve(NBYTES)
    first.fill()
    address = first.tensor.data_ptr()
    accelerator.copy(accelerator.copy_in, first.tensor, accelerator.host_buffer(NBYTES).fill_(1))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    spin(accelerator, "compute")
    read = first.tensor.clone()
    released = accelerator.record(accelerator.compute)
    first.empty()
    second.fill()
    assert second.tensor.data_ptr() == address
    accelerator.copy_in.wait(released)
    accelerator.copy(accelerator.copy_in, second.tensor, accelerator.host_buffer(NBYTES).fill_(2))
    assert bool((read == 1).all())
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    assert bool((second.tensor == 2).all())


def test_without_the_order_it_is_overwritten(accelerator: CudaAccelerator) -> None:
    """That the test above can fail."""
    torch.cuda.empty_cache()
    first, second = accelerator.reserve(NBYTES), accelerator.reserve(NBYTES)
    first.fill()
    accelerator.copy(accelerator.copy_in, first.tensor, accelerator.host_buffer(NBYTES).fill_(1))
    accelerator.compute.wait(accelerator.record(accelerator.copy_in))
    source = accelerator.host_buffer(NBYTES).fill_(2)
    torch.cuda.synchronize()
    spin(accelerator, "compute")
    read = first.tensor.clone()
    first.empty()
    second.fill()
    accelerator.copy(accelerator.copy_in, second.tensor, source)
    assert not bool((read == 1).all())


def test_host_buffers_are_pinned_and_of_the_exact_size(accelerator: CudaAccelerator) -> None:
    buffer = accelerator.host_buffer(3 * MIB + 4096)
    assert buffer.numel() == 3 * MIB + 4096
    assert buffer.data_ptr() % 4096 == 0
    assert buffer.is_pinned()


def test_a_host_buffer_that_goes_leaves_nothing_pinned_at_its_addresses(accelerator: CudaAccelerator) -> None:
    """What is mapped there next is pinned anew, and copies see it, not the pages that were there before."""
    target, addresses = accelerator.reserve(NBYTES), []
    target.fill()
    for number in range(3):
        buffer = accelerator.host_buffer(NBYTES).fill_(number)
        addresses.append(buffer.data_ptr())
        assert buffer.is_pinned()
        accelerator.copy(accelerator.copy_in, target.tensor, buffer)
        accelerator.record(accelerator.copy_in).wait()
        assert bool((target.tensor == number).all())
        del buffer
    assert len(set(addresses)) < len(addresses)


def test_memory_is_pinned_and_let_go(accelerator: CudaAccelerator) -> None:
    memory = populated_pages(NBYTES)
    assert not memory.is_pinned()
    assert accelerator.pin(memory)
    assert memory.is_pinned()
    # Twice is refused, and no error is left for who asks next.
    assert not accelerator.pin(memory)
    accelerator.unpin(memory)
    assert not memory.is_pinned()
    assert accelerator.pin(memory)
    accelerator.unpin(memory)


def test_a_mark_tells_when_the_stream_passed_it_on_the_hosts_clock(accelerator: CudaAccelerator) -> None:
    accelerator.mark(accelerator.compute)
    before = time.perf_counter()
    first = accelerator.mark(accelerator.compute)
    spin(accelerator, "compute")
    second = accelerator.mark(accelerator.compute)
    enqueued = time.perf_counter()
    assert second.seconds() is None
    second.wait()
    after = time.perf_counter()
    begin, end = first.seconds(), second.seconds()
    assert begin is not None
    assert end is not None
    # The two clocks are brought together to some ten microseconds.
    assert before - 1e-3 <= begin <= enqueued + 1e-3
    assert enqueued < end <= after + 1e-3
    assert end - begin > 0.01


def test_marks_stay_exact_far_from_the_first(accelerator: CudaAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_REFERENCE_SECONDS", 0.0)
    marks = []
    for _ in range(5):
        spin(accelerator, "copy_in")
        marks.append(accelerator.mark(accelerator.copy_in))
        marks[-1].wait()
    seconds = [mark.seconds() for mark in marks]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(time.perf_counter(), abs=5e-3)
