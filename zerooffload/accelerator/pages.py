"""Page-aligned host memory that can be given back and refilled at the same addresses.

[Note: huge pages and O_DIRECT]
Direct I/O pins every page of its buffer and the drive sees one segment a page: from 2 MiB pages the same transfer runs
1.4 to 4 times faster than from scattered 4 KiB pages, so a range of 2 MiB and more starts on a 2 MiB boundary and asks
for huge pages. Its tail under 2 MiB stays on 4 KiB pages, so a range takes its size rounded up to 4 KiB, no more.
Never empty a range that is registered with the kernel or a device: I/O would go to the old pages and report success.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from zerooffload.formats import MIB, round_up

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * MIB

# Linux's values; Python's mmap module lacks some of them, depending on its version.
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23


class _Mapping(mmap.mmap):
    """Pages that say when they are about to go, whoever held them last."""

    before_release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_release is not None:
            self.before_release()


class PageRange:
    """A page-aligned range of anonymous host memory (the `DeviceRange` of a CPU). Empty when made.

    Attributes
    ----------
    nbytes : int
        Memory taken while filled: the length asked for, rounded up to a page.
    tensor : torch.Tensor
        uint8, 1D, `[length asked for]`. It keeps the mapping alive.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = host_buffer_nbytes(nbytes)
        huge = self.nbytes >= HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = _Mapping(-1, self.nbytes + (HUGE_PAGE_BYTES if huge else 0), flags=flags)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = -whole.data_ptr() % HUGE_PAGE_BYTES if huge else 0
        self.tensor = whole[self._start : self._start + nbytes]
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, self.nbytes)

    def fill(self) -> None:
        """Pages appear when they are first touched, in the thread that touches them."""

    def empty(self) -> None:
        """Give the pages back; the next touch finds zeros."""
        self._map.madvise(mmap.MADV_DONTNEED, self._start, self.nbytes)

    def populate(self) -> None:
        """Take all pages now, so that no fault comes later; where the kernel cannot, they come when touched."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, self._start, self.nbytes)
        except OSError:
            self.tensor.zero_()

    def before_release(self, action: Callable[[], None]) -> None:
        """Have `action` called when nothing holds the memory any more, while it is still there.

        In any thread, also in a process forked from this one. It must not hold the memory.
        """
        self._map.before_release = action


def host_buffer_nbytes(nbytes: int) -> int:
    """Memory that a host buffer of `nbytes` takes."""
    return round_up(max(nbytes, 1), PAGE_BYTES)


def populated_pages(nbytes: int) -> torch.Tensor:
    """Resident page-aligned host memory: uint8, 1D, `[nbytes]`."""
    pages = PageRange(nbytes)
    pages.populate()
    return pages.tensor
