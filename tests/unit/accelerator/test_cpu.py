from __future__ import annotations

import time

import pytest
import torch

from zerooffload.accelerator import Accelerator, default_accelerator
from zerooffload.accelerator.cpu import CpuAccelerator


@pytest.fixture
def cpu() -> Accelerator:
    return CpuAccelerator()


def test_without_cuda_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    accelerator = default_accelerator()
    assert accelerator.name == "cpu"
    assert accelerator.shares_host_memory
    assert accelerator.device == torch.device("cpu")


def test_a_copy_is_done_when_it_is_enqueued(cpu: Accelerator) -> None:
    target = torch.zeros(4, dtype=torch.uint8)
    cpu.copy(cpu.copy_in, target, torch.ones(4, dtype=torch.uint8))
    assert target.tolist() == [1, 1, 1, 1]
    event = cpu.record(cpu.copy_in)
    event.wait()
    assert event.done()


def test_a_stream_waits_for_a_foreign_event(cpu: Accelerator) -> None:
    class Recorded:
        waited = False

        def wait(self) -> None:
            self.waited = True

        def done(self) -> bool:
            return self.waited

    event = Recorded()
    cpu.compute.wait(event)
    assert event.waited


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000, 3 << 20])
def test_a_range_takes_what_is_announced(cpu: Accelerator, nbytes: int) -> None:
    assert cpu.reserve(nbytes).nbytes == cpu.range_nbytes(nbytes)


def test_a_host_buffer_is_page_aligned(cpu: Accelerator) -> None:
    buffer = cpu.host_buffer(5000)
    assert buffer.numel() == 5000
    assert buffer.data_ptr() % 4096 == 0


def test_available_memory_is_what_the_machine_has(cpu: Accelerator) -> None:
    assert cpu.available_bytes() > 0


def test_a_mark_tells_when_it_was_made(cpu: Accelerator) -> None:
    before = time.perf_counter()
    mark = cpu.mark(cpu.compute)
    after = time.perf_counter()
    mark.wait()
    assert mark.done()
    seconds = mark.seconds()
    assert seconds is not None
    assert before <= seconds <= after
