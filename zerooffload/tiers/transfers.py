"""Copies between host and device, ordered and counted."""

from __future__ import annotations

import torch

from zerooffload.accelerator import Accelerator, Event
from zerooffload.telemetry import Lane, Link, Recorder, Wait, Waits


class Transfers:
    """The two copy queues of an accelerator."""

    def __init__(self, accelerator: Accelerator, waits: Waits, recorder: Recorder) -> None:
        self._accelerator = accelerator
        self._waits = waits
        self._recorder = recorder

    def to_host(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        produced: Wait,
        name: str = "",
        *,
        computed: Event | None = None,
    ) -> Event:
        """Copy what compute has written at `computed` (default: by what it was given so far) to host memory.

        `name` is what timelines show.
        """
        accelerator = self._accelerator
        self._waits.order(produced, accelerator.copy_out, computed or self.compute_done())
        with self._recorder.on_stream(Lane.COPY_OUT, accelerator.copy_out, name or "copy", target.nbytes):
            accelerator.copy(accelerator.copy_out, target, source)
        self._recorder.moved(Link.COPY_OUT, target.nbytes)
        return accelerator.record(accelerator.copy_out)

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, used: Event, reuse: Wait, *, name: str = ""
    ) -> Event:
        """Copy to device memory that compute has done with at `used`."""
        self._waits.order(reuse, self._accelerator.copy_in, used)
        return self.copy_in(target, source, name)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, name: str = "") -> Event:
        """Copy to device memory for which `copy_in` is already ordered behind compute."""
        accelerator = self._accelerator
        with self._recorder.on_stream(Lane.COPY_IN, accelerator.copy_in, name or "copy", target.nbytes):
            accelerator.copy(accelerator.copy_in, target, source)
        self._recorder.moved(Link.COPY_IN, target.nbytes)
        return accelerator.record(accelerator.copy_in)

    def went_straight_in(self, nbytes: int) -> None:
        """Count bytes that a drive has brought to the device by itself: they take the same way into it."""
        self._recorder.moved(Link.COPY_IN, nbytes)

    def compute_done(self) -> Event:
        """The end of what compute has been given so far."""
        return self._accelerator.record(self._accelerator.compute)
