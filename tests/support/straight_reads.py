"""A simulated drive that writes to the memory of a simulated device by itself, as GPUDirect Storage does.

It is in nobody's queue. So it delivers poison where the host did not know that the memory's last use was over, and that
memory may not be given back before it has come.
"""

from __future__ import annotations

from typing import Any

import torch
from support.simulated_accelerator import POISON, SimulatedAccelerator
from support.simulated_engine import SimulatedEngine, SimulatedTicket

from zerooffload.accelerator import populated_pages
from zerooffload.aio import OpenFile


class StraightEngine(SimulatedEngine):
    """See the note above.

    Attributes
    ----------
    num_straight : int
        Reads into the device's memory so far.
    """

    reads_devices = True

    def __init__(self, accelerator: SimulatedAccelerator, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._accelerator = accelerator
        self.num_straight = 0

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> SimulatedTicket:
        """Into the device's memory by way of pages, whose address is fit for direct I/O."""
        if not self._accelerator.has(target):
            return super().submit_read(file, offset_bytes, target)
        self.num_straight += 1
        pages = populated_pages(target.numel())
        read = super().submit_read(file, offset_bytes, pages)
        arrives = self._accelerator.drive_writes(target)

        def happen() -> None:
            try:
                read.wait()
            finally:
                arrives(pages)

        target.fill_(POISON)
        return _Following(happen, read)


class _Following(SimulatedTicket):
    """What happens behind an operation."""

    def __init__(self, action: Any, read: SimulatedTicket) -> None:
        super().__init__(action)
        self._read = read

    def done(self) -> bool:
        """Whether that has: where a thread does it, what follows is done by who waits."""
        return super().done() or self._read.done()
