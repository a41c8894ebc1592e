"""From device memory to host buffers, chunk by chunk, on a thread that the one that trains does not wait for.

[Note: nobody waits for the device]
The host runs ahead of the device: when autograd hands over a gradient, the device may be far from having computed it.
The thread that trains notes that point of compute and goes on. This thread lets the copies follow it, waits for them,
and does what the host has to do with them. Who trains waits only if all memory is taken, and for the norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import torch

from zerooffload.accelerator import Event
from zerooffload.runtime.worker_thread import Idle, Outcome, WorkerThread
from zerooffload.telemetry import Wait, Waitable, Waits
from zerooffload.tiers import StagingRing, StagingSlot, Transfers

Join = Callable[[torch.Tensor, StagingSlot | None], list[Waitable]]
"""Takes a chunk in host memory, uint8, and its slot, if it has one; returns what still uses the slot."""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Goes through a slot of the ring, or straight to `target`."""

    source: torch.Tensor
    computed: Event
    name: str
    join: Join
    target: torch.Tensor | None = None
    copied: Outcome = field(default_factory=Outcome)


@dataclass(frozen=True)
class _Copying:
    chunk: _Chunk
    content: torch.Tensor
    slot: StagingSlot | None
    event: Event


class CopyDown:
    """Chunks on their way down, joined in the order in which they were sent.

    Parameters
    ----------
    ring : StagingRing
        Used by this alone while something is under way.
    in_background : callable
        Makes a context in which the thread works.
    """

    def __init__(
        self,
        ring: StagingRing,
        transfers: Transfers,
        waits: Waits,
        in_background: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._ring = ring
        self._transfers = transfers
        self._waits = waits
        self._sent: deque[_Chunk | Callable[[], None]] = deque()
        self._copying: deque[_Copying] = deque()
        self._failure: BaseException | None = None
        self._thread = WorkerThread(
            "zerooffload-gradients",
            self._work,
            has_work=lambda: bool(self._sent),
            failed=self._fail,
            in_background=in_background,
        )

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._thread.is_busy

    def send(
        self, source: torch.Tensor, computed: Event, name: str, join: Join, *, target: torch.Tensor | None = None
    ) -> Waitable:
        """Copy a chunk, uint8 1D on the device, once compute has passed `computed`; what its memory is in use until.

        It goes to a slot of the ring, or straight to `target`, on the host, which may be shorter by padding.
        """
        chunk = _Chunk(source, computed, name, join, target)
        self._put(chunk)
        return chunk.copied

    def call(self, action: Callable[[], None]) -> None:
        """Call `action` when everything that was sent before is joined."""
        self._put(action)

    def finish(self) -> None:
        """Return when everything is joined.

        Raises
        ------
        BaseException
            What went wrong with something that was sent since the last call; what came after it is lost.
        """
        if self.is_busy:
            self._waits.until(Wait.GRADIENT_LANDING, Idle(self._thread))
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Drop what is under way."""
        with self._thread.changed:
            self._drop(None)
        self._thread.wait_idle()
        self._failure = None

    def _put(self, item: _Chunk | Callable[[], None]) -> None:
        with self._thread.changed:
            self._sent.append(item)
        self._thread.wake()

    def _work(self) -> None:
        while True:
            with self._thread.changed:
                item = self._sent.popleft() if self._sent and self._may_begin(self._sent[0]) else None
            if isinstance(item, _Chunk):
                self._begin(item)
            elif item is not None:
                item()
            elif self._copying:
                self._join_first()
            else:
                return

    def _may_begin(self, item: _Chunk | Callable[[], None]) -> bool:
        if isinstance(item, _Chunk):
            return item.target is not None or self._ring.num_free > 0
        return not self._copying

    def _begin(self, chunk: _Chunk) -> None:
        slot: StagingSlot | None = None
        try:
            content = chunk.target
            if content is None:
                slot = self._ring.acquire(self._waits)
                content = slot.take(chunk.source.numel())
            source = chunk.source[: content.numel()]
            event = self._transfers.to_host(
                content, source, Wait.GRADIENT_COMPUTED, chunk.name, computed=chunk.computed
            )
        except BaseException as error:
            chunk.copied.over(error)
            if slot is not None:
                self._ring.release(slot)
            raise
        self._copying.append(_Copying(chunk, content, slot, event))

    def _join_first(self) -> None:
        item = self._copying.popleft()
        leaving: list[Waitable] = [item.event]
        try:
            try:
                self._waits.until(Wait.GRADIENT_COPY, item.event)
            except BaseException as error:
                item.chunk.copied.over(error)
                leaving = []
                raise
            item.chunk.copied.over()
            leaving = item.chunk.join(item.content, item.slot)
        finally:
            if item.slot is not None:
                self._ring.release(item.slot, leaving)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for item in self._copying:
            with suppress(Exception):
                item.event.wait()
            item.chunk.copied.over(error)
            if item.slot is not None:
                self._ring.release(item.slot)
        self._copying.clear()
        self._drop(error)

    def _drop(self, error: BaseException | None) -> None:
        for item in self._sent:
            if isinstance(item, _Chunk):
                item.copied.over(error)
        self._sent.clear()
