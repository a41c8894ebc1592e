from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from zerooffload.accelerator import pages
from zerooffload.accelerator.pages import HUGE_PAGE_BYTES, PAGE_BYTES, PageRange, host_buffer_nbytes, populated_pages

LENGTHS = [1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 7, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_range_has_the_length_asked_for_and_starts_on_a_page(length: int) -> None:
    memory = PageRange(length)
    assert memory.tensor.shape == (length,)
    assert memory.tensor.dtype is torch.uint8
    assert memory.tensor.data_ptr() % (HUGE_PAGE_BYTES if length >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0
    assert memory.nbytes == host_buffer_nbytes(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_emptied_range_keeps_its_addresses_and_lost_its_bytes(length: int) -> None:
    memory = PageRange(length)
    memory.fill()
    memory.tensor.fill_(7)
    address = memory.tensor.data_ptr()
    memory.empty()
    memory.fill()
    assert memory.tensor.data_ptr() == address
    assert not memory.tensor.any()
    memory.tensor.fill_(9)
    assert bool((memory.tensor == 9).all())


def test_emptying_a_range_leaves_its_neighbours_alone() -> None:
    ranges = [PageRange(3 * PAGE_BYTES) for _ in range(3)]
    for number, memory in enumerate(ranges):
        memory.tensor.fill_(number + 1)
    ranges[1].empty()
    assert [int(memory.tensor.sum()) for memory in ranges] == [3 * PAGE_BYTES, 0, 9 * PAGE_BYTES]


def test_a_view_keeps_the_mapping_alive() -> None:
    view = PageRange(PAGE_BYTES).tensor[10:20].view(torch.uint8)
    view.fill_(3)
    assert view.tolist() == [3] * 10


def test_who_wants_to_know_is_told_once_before_memory_goes() -> None:
    memory = PageRange(HUGE_PAGE_BYTES)
    address, told = memory.tensor.data_ptr(), []
    memory.before_release(lambda: told.append(ctypes.string_at(address, 3)))
    memory.tensor[:3].fill_(ord("x"))
    view = memory.tensor[5:7]
    del memory
    assert told == []
    del view
    assert told == [b"xxx"]


def test_memory_is_resident_only_once_it_is_used_and_gone_once_it_is_emptied() -> None:
    length = 16 * HUGE_PAGE_BYTES
    memory = PageRange(length)
    assert _resident_bytes(memory) == 0
    memory.populate()
    assert _resident_bytes(memory) == length
    memory.empty()
    assert _resident_bytes(memory) == 0


def test_populating_works_where_the_kernel_does_not_know_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    memory = populated_pages(3 * PAGE_BYTES + 5)
    assert memory.shape == (3 * PAGE_BYTES + 5,)
    assert not memory.any()


@pytest.mark.parametrize(("length", "taken"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)])
def test_a_buffer_takes_whole_pages(length: int, taken: int) -> None:
    assert mmap.PAGESIZE == PAGE_BYTES
    assert host_buffer_nbytes(length) == taken


def _resident_bytes(memory: PageRange) -> int:
    """What /proc says about the mapping that holds the range."""
    address, inside = memory.tensor.data_ptr(), False
    with open("/proc/self/smaps", encoding="ascii") as smaps:  # noqa: PTH123 - not a path of ours
        for line in smaps:
            bounds = line.split(" ", 1)[0].split("-")
            if len(bounds) == 2:
                inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return -1
