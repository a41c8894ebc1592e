"""Copies between host and device, ordered and counted."""

from __future__ import annotations

import torch

from zerooffload.accelerator import Accelerator, Event
from zerooffload.telemetry import Link, Recorder, Wait, Waits


class Transfers:
    """The two copy queues of an accelerator."""

    def __init__(self, accelerator: Accelerator, waits: Waits, recorder: Recorder) -> None:
        self._accelerator = accelerator
        self._waits = waits
        self._recorder = recorder

    def to_host(self, target: torch.Tensor, source: torch.Tensor, produced: Wait) -> Event:
        """Copy what compute has written (or will, by what it was given so far) to host memory."""
        accelerator = self._accelerator
        self._waits.order(produced, accelerator.copy_out, accelerator.record(accelerator.compute))
        accelerator.copy(accelerator.copy_out, target, source)
        self._recorder.moved(Link.COPY_OUT, target.nbytes)
        return accelerator.record(accelerator.copy_out)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, used: Event, reuse: Wait) -> Event:
        """Copy to device memory that compute has done with at `used`."""
        self._waits.order(reuse, self._accelerator.copy_in, used)
        return self.copy_in(target, source)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy to device memory for which `copy_in` is already ordered behind compute."""
        accelerator = self._accelerator
        accelerator.copy(accelerator.copy_in, target, source)
        self._recorder.moved(Link.COPY_IN, target.nbytes)
        return accelerator.record(accelerator.copy_in)

    def compute_done(self) -> Event:
        """The end of what compute has been given so far."""
        return self._accelerator.record(self._accelerator.compute)
