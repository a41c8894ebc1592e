"""Inputs of blocks between their forward and their backward: left where they are, or sent to another tier.

[Note: block inputs away from the device]
An input that the device could use at its home stays the tensor that it is, and its bytes are leased. Another is cut
into pages of one size, which come from blocks of the tier that are used again and again, so that lengths may vary from
step to step. Beside a device with memory of its own it goes down from one of two buffers there, on a thread of its own.
Backward wants the inputs in the reverse order: while one is used in one buffer, the one before it comes to the other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from zerooffload.accelerator import DeviceRange, Event
from zerooffload.config import TierName
from zerooffload.errors import BudgetError, ConfigError, InternalError, TierIOError
from zerooffload.formats import round_up
from zerooffload.memory import Lease
from zerooffload.planner import block_inputs
from zerooffload.runtime.copy_down import CopyDown
from zerooffload.runtime.read_ahead import Settled
from zerooffload.runtime.sliced_call import Kept, KeptByAutograd
from zerooffload.telemetry import Wait, Waitable, wait_for_all
from zerooffload.tiers import FILE_ALIGNMENT_BYTES, Block, Part, RecordLayout, Space, StagingSlot

if TYPE_CHECKING:
    from zerooffload.runtime.resources import Parts, Resources


class KeptHere(KeptByAutograd):
    """An input that stays where it is; its bytes are leased. See `Kept`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def release(self) -> None:
        """Give the lease back."""
        self._lease.release()


class KeptAway:
    """An input on another tier. See `Kept`."""

    is_away = True

    def __init__(self, store: ActivationStore, tier: TierName, tensor: torch.Tensor, pages: list[_Page]) -> None:
        self.tier = tier
        self.pages = pages
        self.nbytes = tensor.nbytes
        self.coming: _Return | None = None
        self._store = store
        self._shape, self._dtype = tensor.shape, tensor.dtype

    def bring(self) -> torch.Tensor:
        """Wait for it, and start to bring what went away before it.

        Raises
        ------
        ConfigError
            If it was used before: a graph is gone through once.
        TierIOError
            If it cannot be read, or could not be written.
        """
        if not self.pages:
            raise ConfigError(
                "a second backward through the same graph (retain_graph=True) finds no inputs on their tier any more:"
                ' keep them on the device, OffloadConfig(activations="device")'
            )
        return self._store.bring(self).view(self._dtype).view(self._shape)

    def release(self) -> None:
        """Give the pages back."""
        self._store.forget(self)

    def __del__(self) -> None:
        self.release()


@dataclass(eq=False)
class _Page:
    """A piece of a tier, and the write to it that nobody has waited for."""

    block: Block
    written: Waitable | None = None


@dataclass(eq=False)
class _Buffer:
    """Device memory for a whole input, and what still copies from it."""

    memory: DeviceRange
    lease: Lease
    leaving: list[Waitable] = field(default_factory=list)
    is_taken: bool = False


@dataclass(eq=False)
class _StagedRead:
    page: _Page
    slot: StagingSlot
    record: torch.Tensor
    ticket: Waitable
    target: torch.Tensor


@dataclass(eq=False)
class _Return:
    """An input on its way to a buffer."""

    buffer: _Buffer
    used: Event
    unread: deque[tuple[_Page, torch.Tensor]] = field(default_factory=deque)
    staged: deque[_StagedRead] = field(default_factory=deque)
    direct: list[Waitable] = field(default_factory=list)
    last_copy: Event | None = None


class ActivationStore:
    """Keeps the inputs of a run's blocks. See [Note: block inputs away from the device]."""

    def __init__(self, resources: Resources, parts: Parts) -> None:
        self._page_nbytes = block_inputs.PAGE_NBYTES
        self._resources = resources
        self._ring = resources.block_input_ring
        self._accelerator = parts.accelerator
        self._transfers = parts.transfers
        self._waits = parts.waits
        self._down = CopyDown(self._ring, parts.transfers, parts.waits, parts.recorder.in_background)
        self._buffers: deque[_Buffer] = deque()
        self._free_pages: dict[TierName, list[_Page]] = {}
        # In the order of forward. Autograd holds them: one whose graph is gone must go too.
        self._refs: list[weakref.ref[KeptAway]] = []
        self._numbers = count()

    def keeper(self, tier: TierName) -> Callable[[torch.Tensor], Kept]:
        """What keeps inputs on `tier`."""
        is_reached = tier is TierName.DEVICE or (tier is TierName.HOST and self._accelerator.shares_host_memory)
        return partial(self._keep_here if is_reached else self._send_away, tier)

    def advance(self) -> None:
        """Let what is on its way back go on, without waiting."""
        for kept in self._away:
            if kept.coming is None:
                continue
            try:
                self._issue(kept.coming)
                while kept.coming.staged and kept.coming.staged[0].ticket.done():
                    self._copy_first(kept.coming)
                    self._issue(kept.coming)
            except TierIOError:
                # It is asked for again when it is needed.
                self._cancel(kept)

    def bring(self, kept: KeptAway) -> torch.Tensor:
        """The bytes of an input, for compute; what was sent before it follows."""
        self._down.finish()
        earlier = self._away[: self._away.index(kept)]
        if kept.coming is None:
            self._make_a_buffer_free()
            self._begin(kept)
        coming = kept.coming
        if coming is None:
            raise InternalError("the input of a block is not on its way back")
        try:
            self._arrive(kept, coming)
        except BaseException:
            self._cancel(kept)
            raise
        if earlier and earlier[-1].coming is None and self._has_free_buffer:
            with suppress(TierIOError):
                # Told when it is asked for.
                self._begin(earlier[-1])
        return coming.buffer.memory.tensor[: kept.nbytes]

    def _arrive(self, kept: KeptAway, coming: _Return) -> None:
        wait_for_all(self._waits, Wait.ACTIVATION_READ, coming.direct)
        while coming.unread or coming.staged:
            if not coming.staged and not self._ring.num_free:
                self._cancel_others(kept)
            self._issue(coming)
            self._copy_first(coming)
        self._let_compute_follow(coming)

    def forget(self, kept: KeptAway) -> None:
        """An input is not needed any more; again is harmless."""
        self._cancel(kept)
        self._free_pages.setdefault(kept.tier, []).extend(kept.pages)
        kept.pages = []
        self._refs = [ref for ref in self._refs if ref() not in (None, kept)]

    def close(self) -> None:
        """Drop what is under way."""
        self._down.abandon()
        for kept in self._away:
            self._cancel(kept)

    @property
    def _away(self) -> list[KeptAway]:
        return [kept for ref in self._refs if (kept := ref()) is not None]

    def _keep_here(self, tier: TierName, tensor: torch.Tensor) -> Kept:
        return KeptHere(self._lease(tier, tensor.nbytes))

    def _send_away(self, tier: TierName, tensor: torch.Tensor) -> Kept:
        for other in self._away:
            # Guessed wrong: no backward has followed that wanted it.
            self._cancel(other)
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        num_pages = -(-tensor.nbytes // self._page_nbytes)
        kept = KeptAway(self, tier, tensor, self._take_pages(tier, num_pages))
        self._refs.append(weakref.ref(kept))
        if self._accelerator.shares_host_memory:
            for page, piece in zip(kept.pages, content.split(self._page_nbytes), strict=True):
                slot = self._ring.acquire(self._waits)
                record = slot.take(round_up(piece.numel(), FILE_ALIGNMENT_BYTES))
                record[: piece.numel()].copy_(piece)
                self._ring.release(slot, self._land(page, record, slot))
            return kept
        buffer = self._take_buffer(tensor.nbytes)
        buffer.memory.tensor[: tensor.nbytes].copy_(content)
        computed = self._transfers.compute_done()
        for page, piece in zip(kept.pages, self._pieces(buffer, tensor.nbytes), strict=True):
            buffer.leaving.append(self._down.send(piece, computed, page.block.name, partial(self._land, page)))
        return kept

    def _land(self, page: _Page, content: torch.Tensor, _: StagingSlot) -> list[Waitable]:
        """Take a piece in host memory home; what still uses it."""
        view = page.block.view(Space.HOST, 0)
        if view is not None:
            view[: content.numel()].copy_(content)
            return []
        if page.written is not None:
            # Of two writes to one place either may be the last. What became of the first one nobody asks any more.
            self._waits.until(Wait.ACTIVATION_WRITE, Settled(page.written))
        page.written = page.block.write(0, content)
        # If it fails, whoever reads the page is told.
        return [Settled(page.written)]

    def _begin(self, kept: KeptAway) -> None:
        buffer = self._take_buffer(kept.nbytes)
        buffer.is_taken = True
        kept.coming = _Return(buffer, self._transfers.compute_done())
        try:
            self._start(kept, kept.coming)
        except BaseException:
            self._cancel(kept)
            raise

    def _start(self, kept: KeptAway, coming: _Return) -> None:
        for page, target in zip(kept.pages, self._pieces(coming.buffer, kept.nbytes), strict=True):
            view = page.block.view(Space.HOST, 0)
            if view is not None:
                source, name = view[: target.numel()], page.block.name
                coming.last_copy = self._transfers.to_device(
                    target, source, coming.used, Wait.ACTIVATION_REUSE, name=name
                )
            elif self._accelerator.shares_host_memory:
                self._wait_until_written(page)
                coming.direct.append(page.block.read(0, target))
            else:
                coming.unread.append((page, target))
        self._issue(coming)

    def _issue(self, coming: _Return) -> None:
        while coming.unread and self._ring.num_free:
            page, target = coming.unread.popleft()
            self._wait_until_written(page)
            slot = self._ring.acquire(self._waits)
            record = slot.take(target.numel())
            coming.staged.append(_StagedRead(page, slot, record, page.block.read(0, record), target))

    def _copy_first(self, coming: _Return) -> None:
        if not coming.staged:
            return
        first = coming.staged.popleft()
        leaving: list[Waitable] = [Settled(first.ticket)]
        try:
            self._waits.until(Wait.ACTIVATION_READ, first.ticket)
            coming.last_copy = self._transfers.to_device(
                first.target, first.record, coming.used, Wait.ACTIVATION_REUSE, name=first.page.block.name
            )
            leaving = [coming.last_copy]
        finally:
            self._ring.release(first.slot, leaving)

    def _cancel_others(self, kept: KeptAway) -> None:
        """Who is waited for needs what those hold that were only guessed."""
        for other in self._away:
            if other is not kept:
                self._cancel(other)

    def _cancel(self, kept: KeptAway) -> None:
        coming, kept.coming = kept.coming, None
        if coming is None:
            return
        for read in coming.staged:
            self._ring.release(read.slot, [Settled(read.ticket)])
        for ticket in coming.direct:
            Settled(ticket).wait()
        # What compute writes to its buffer next, or copies to its pages, must not come before.
        self._let_compute_follow(coming)
        coming.buffer.is_taken = False

    def _let_compute_follow(self, coming: _Return) -> None:
        if coming.last_copy is not None:
            self._waits.order(Wait.ACTIVATION_COPY, self._accelerator.compute, coming.last_copy)

    @property
    def _has_free_buffer(self) -> bool:
        return len(self._buffers) < block_inputs.NUM_BUFFERS or any(not buffer.is_taken for buffer in self._buffers)

    def _make_a_buffer_free(self) -> None:
        if not self._has_free_buffer:
            for kept in self._away:
                self._cancel(kept)

    def _take_buffer(self, nbytes: int) -> _Buffer:
        """The one used longest ago; what was in it has left."""
        if len(self._buffers) < block_inputs.NUM_BUFFERS:
            buffer = self._new_buffer(nbytes)
        else:
            buffer = next(buffer for buffer in self._buffers if not buffer.is_taken)
            leaving, buffer.leaving = buffer.leaving, []
            if leaving:
                wait_for_all(self._waits, Wait.ACTIVATION_COPY, leaving)
                # Nobody uses it any more, compute included: what comes next need not be ordered behind what was there.
                buffer.memory.empty()
                buffer.memory.fill()
            self._buffers.remove(buffer)
            if buffer.memory.tensor.numel() < nbytes:
                # Compute may still use it, and the memory goes to whoever asks next.
                self._transfers.compute_done().wait()
                buffer.memory.empty()
                buffer.lease.release()
                buffer = self._new_buffer(nbytes)
        self._buffers.append(buffer)
        return buffer

    def _new_buffer(self, nbytes: int) -> _Buffer:
        memory = self._accelerator.reserve(round_up(nbytes, FILE_ALIGNMENT_BYTES))
        lease = self._lease(TierName.DEVICE, memory.nbytes)
        memory.fill()
        return _Buffer(memory, lease)

    def _pieces(self, buffer: _Buffer, nbytes: int) -> tuple[torch.Tensor, ...]:
        whole = buffer.memory.tensor[: round_up(nbytes, FILE_ALIGNMENT_BYTES)]
        return tuple(whole.split(self._page_nbytes))

    def _take_pages(self, tier: TierName, num_pages: int) -> list[_Page]:
        free = self._free_pages.setdefault(tier, [])
        if len(free) < num_pages:
            free += self._new_pages(tier, num_pages - len(free))
        return [free.pop() for _ in range(num_pages)]

    def _new_pages(self, tier: TierName, num_pages: int) -> list[_Page]:
        home = self._resources.tiers[tier]
        layout = RecordLayout((Part("page", torch.uint8),), self._page_nbytes, self._page_nbytes)
        self._make_room(tier, num_pages * home.block_nbytes(layout))
        pages = []
        try:
            for _ in range(num_pages):
                name = f"block input page {next(self._numbers)}"
                pages.append(_Page(home.allocate(layout, block_inputs.HOLDER, name=name)))
        except BudgetError as error:
            raise _with_advice(error, tier) from None
        home.reserve()
        return pages

    def _wait_until_written(self, page: _Page) -> None:
        """A read might come first."""
        if page.written is not None:
            self._waits.until(Wait.ACTIVATION_WRITE, page.written)
            page.written = None

    def _lease(self, tier: TierName, nbytes: int) -> Lease:
        self._make_room(tier, nbytes)
        try:
            return self._resources.budgets[tier].lease(nbytes, block_inputs.HOLDER)
        except BudgetError as error:
            raise _with_advice(error, tier) from None

    def _make_room(self, tier: TierName, nbytes: int) -> None:
        """What was set aside is taken first."""
        set_aside = self._resources.block_input_leases.get(tier)
        if set_aside is not None:
            set_aside.shrink(min(nbytes, set_aside.nbytes))


def _with_advice(error: BudgetError, tier: TierName) -> BudgetError:
    return BudgetError(
        f"{error} Parameters in use and caches take what a budget leaves over: set bytes aside for the inputs of blocks"
        f' with OffloadConfig(activation_memory={{"{tier.value}": ...}})'
    )
