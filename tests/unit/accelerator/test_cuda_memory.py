"""What `CudaAccelerator` takes of a driver, and gives back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from support.cuda_on_cpu import Driver, cuda_on_cpu

from zerooffload.accelerator import populated_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerooffload.accelerator.cuda import CudaAccelerator

NBYTES = 8192


@pytest.fixture
def cuda() -> Iterator[tuple[CudaAccelerator, Driver]]:
    with cuda_on_cpu() as made:
        yield made


def test_a_host_buffer_is_let_go_before_its_memory_is_gone(cuda: tuple[CudaAccelerator, Driver]) -> None:
    accelerator, driver = cuda
    for number in range(4):
        buffer = accelerator.host_buffer(NBYTES).fill_(ord("a") + number)
        assert driver.registered == {buffer.data_ptr(): NBYTES}
        view = buffer[5:7]
        del buffer
        assert len(driver.registered) == 1
        del view
        assert driver.registered == {}
    assert driver.let_go == [b"aaa", b"bbb", b"ccc", b"ddd"]


def test_what_could_not_be_registered_is_not_let_go(cuda: tuple[CudaAccelerator, Driver]) -> None:
    accelerator, driver = cuda
    driver.refuses = True
    buffer = accelerator.host_buffer(NBYTES)
    assert not accelerator.pin(populated_pages(NBYTES))
    assert driver.num_forgotten == 2
    del buffer
    assert driver.let_go == []


def test_a_forked_process_lets_nothing_go(
    cuda: tuple[CudaAccelerator, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, driver = cuda
    buffer, pid = accelerator.host_buffer(NBYTES), os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        del buffer
    assert driver.let_go == []
    driver.registered.clear()


def test_a_range_gives_its_memory_back_and_views_of_it_stay(cuda: tuple[CudaAccelerator, Driver]) -> None:
    accelerator, _ = cuda
    memory = accelerator.reserve(NBYTES)
    assert memory.tensor.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        _ = memory.tensor[:4]
    memory.fill()
    view = memory.tensor[8:16].view(torch.float32)
    for value in (1.5, 2.5):
        memory.tensor.zero_()
        view.fill_(value)
        assert memory.tensor.count_nonzero() > 0
        memory.empty()
        assert view.untyped_storage().nbytes() == 0
        memory.fill()
