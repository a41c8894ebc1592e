"""Bringing a unit's parameters from their homes into its ranges.

Where the device shares host memory, records are read straight into the range. Elsewhere what the host addresses is
copied, and what it does not address passes through a staging slot: all staged records wait in one queue, first come,
first served, so that a fetch that is waited for finishes those before it. Slots that are left read the units that come
next, while the device has no room for them yet. A unit whose update is still under way is read when that is over; what
the update has left in memory is copied from there, as soon as it is computed.

An engine that reaches the device's memory reads straight into the range there too. No queue of the device orders that,
so a read begins when the host knows that compute has done with the memory; the device's window is what is read ahead.

Parameters of other ranks that a home holds come with the gathering that follows an update. Where their unit may be
fetched again before the next update, they are taken home from the range, and read from there then. A home that ranks
share has theirs already, and each takes a part of the others there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from zerooffload.accelerator import Accelerator, Event
from zerooffload.runtime.arrivals import Arrivals
from zerooffload.runtime.home_reads import HomeReads
from zerooffload.runtime.read_ahead import ReadAhead, Settled, StagedRecord, read_into_slot
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.unit import Unit, UnitFlat
from zerooffload.telemetry import Wait, Waitable, Waits, wait_for_all
from zerooffload.tiers import Block, Space, StagingRing, Transfers


class Fetch:
    """A unit on its way: what is still outstanding."""

    def __init__(self, unit: Unit, refill_after: Event) -> None:
        self.unit = unit
        self.refill_after = refill_after
        self.direct_reads: list[Waitable] = []
        self.num_staged = 0
        self.last_copy: Event | None = None
        self.failure: Exception | None = None


@dataclass
class _Read:
    fetch: Fetch
    home: Block
    chunk: int
    target: torch.Tensor


@dataclass
class _Reading:
    wanted: _Read
    staged: StagedRecord


class Fetcher:
    """Starts and finishes fetches."""

    def __init__(
        self,
        accelerator: Accelerator,
        transfers: Transfers,
        ring: StagingRing,
        waits: Waits,
        updates: UpdateQueue,
        *,
        home_reads: HomeReads,
        arrivals: Arrivals,
        reads_device: bool,
    ) -> None:
        self._updates = updates
        self._reads_device = reads_device
        self._straight: deque[_Read] = deque()
        self._home_reads = home_reads
        self._arrivals = arrivals
        self._not_begun: list[Fetch] = []
        self._accelerator = accelerator
        self._transfers = transfers
        self._ring = ring
        self._waits = waits
        self._queue: deque[_Read] = deque()
        self._reading: deque[_Reading] = deque()
        self._early = ReadAhead(ring, waits)
        self._going_home: dict[Unit, list[Waitable]] = {}

    def start(self, unit: Unit, refill_after: Event) -> Fetch:
        """Begin to fill the unit's ranges, whose memory compute has done with at `refill_after`."""
        fetch = Fetch(unit, refill_after)
        for part in unit.moving_parts:
            if part.range is not None:
                part.range.fill()
        self._not_begun.append(fetch)
        self._begin_updated()
        return fetch

    def _begin_updated(self) -> None:
        """Begin to read, in the order of need, up to the first whose update is neither home nor in memory.

        Where one failed, who waits for its fetch is told.
        """
        while self._not_begun and self._is_updated(self._not_begun[0].unit):
            self._begin(self._not_begun[0])

    def _is_updated(self, unit: Unit) -> bool:
        parts = unit.moving_parts
        return all(arrived.done() for arrived in self._arrived(parts)) and (
            self._updates.has_parameters(parts) or all(self._updates.lends(part, part.current_chunks) for part in parts)
        )

    def _arrived(self, parts: Iterable[UnitFlat]) -> Iterator[Waitable]:
        """What must be over before the homes hold what other ranks take there; see [Note: each takes a part home]."""
        for part in parts:
            arrived = self._arrivals.of(part) if part.copies_are_current else None
            if arrived is not None:
                yield arrived

    def _begin(self, fetch: Fetch) -> None:
        self._updates.wait_for_steps(fetch.unit.moving_parts)
        for arrived in self._arrived(fetch.unit.moving_parts):
            self._waits.until(Wait.PARAMETER_WRITE, arrived)
        self._not_begun.remove(fetch)
        for part in fetch.unit.moving_parts:
            if part.range is None:
                continue
            # Copies that are not current are gathered when what this rank updates is there.
            for chunk in part.current_chunks:
                self._start_record(fetch, part, chunk, part.place_of(chunk, part.range.tensor))

    def _start_record(self, fetch: Fetch, part: UnitFlat, chunk: int, target: torch.Tensor) -> None:
        home, copy = part.home, partial(self._copy, fetch, part.home, chunk, target)
        source = home.view(Space.HOST, chunk)
        if source is not None:
            self._updates.wait_for_parameters([part])
            self._home_reads.begun(home, chunk, copy(source))
        elif self._early.has(home, chunk) or not self._updates.lend(part, chunk, copy):
            self._updates.wait_for_parameters([part])
            self._read(fetch, home, chunk, target)

    def _copy(self, fetch: Fetch, home: Block, chunk: int, target: torch.Tensor, record: torch.Tensor) -> Event:
        """From host memory."""
        nbytes = home.layout.record_nbytes(chunk)
        fetch.last_copy = self._transfers.to_device(
            target[:nbytes], record[:nbytes], fetch.refill_after, Wait.RANGE_REFILL, name=f"{home.name} #{chunk}"
        )
        return fetch.last_copy

    def _read(self, fetch: Fetch, home: Block, chunk: int, target: torch.Tensor) -> None:
        if self._accelerator.shares_host_memory:
            fetch.direct_reads.append(home.read(chunk, target))
            return
        if self._reads_device:
            self._straight.append(_Read(fetch, home, chunk, target))
            self._read_straight()
            return
        # Every staged copy runs on `copy_in`, so ordering that queue once is enough.
        self._waits.order(Wait.RANGE_REFILL, self._accelerator.copy_in, fetch.refill_after)
        fetch.num_staged += 1
        wanted = _Read(fetch, home, chunk, target)
        early = self._early.take(home, chunk)
        if early is None:
            self._queue.append(wanted)
        else:
            self._reading.append(_Reading(wanted, early))
        self._advance_staged()

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """Begin to read units that the device has no room for yet, in this order, as far as staging slots reach."""
        if self._accelerator.shares_host_memory or self._reads_device:
            return
        for unit in units:
            # Without slots to spare, as where nothing is on files, no unit is looked at: this runs in every hook.
            if (
                self._queue
                or not self._early.has_room(len(self._reading))
                or not self._updates.has_parameters(unit.moving_parts)
            ):
                return
            for part in unit.moving_parts:
                far = [
                    chunk
                    for chunk in part.current_chunks
                    if part.home.view(Space.HOST, chunk) is None and not self._updates.lends(part, [chunk])
                ]
                if not self._early.begin(part.home, far, len(self._reading)):
                    return

    def drop_read_ahead(self) -> None:
        """What was read ahead is not wanted: it holds no staging slot any more."""
        self._early.drop()

    def advance(self) -> None:
        """Do what can be done without waiting."""
        self._begin_updated()
        self._read_straight()
        self._advance_staged()

    def _advance_staged(self) -> None:
        self._issue()
        while self._reading and self._reading[0].staged.ticket.done():
            self._copy_first()
            self._issue()

    def finish(self, fetch: Fetch) -> None:
        """Wait until the parameters are there, for compute.

        Raises
        ------
        TierIOError
            If a record could not be read; the ranges' contents are then undefined.
        """
        if fetch in self._not_begun:
            self._begin(fetch)
        with self._updates.giving_way():
            while any(item.fetch is fetch for item in self._straight):
                self._waits.until(Wait.RANGE_REFILL, self._straight[0].fetch.refill_after)
                self._read_first_straight()
            wait_for_all(self._waits, Wait.PARAMETER_READ, fetch.direct_reads)
            while fetch.num_staged:
                self._issue()
                self._copy_first()
        if fetch.failure is not None:
            raise fetch.failure
        if fetch.last_copy is not None:
            self._waits.order(Wait.PARAMETER_COPY, self._accelerator.compute, fetch.last_copy)

    def cancel(self, fetch: Fetch) -> None:
        """See to it that nothing goes to the ranges of a fetch that failed."""
        if fetch in self._not_begun:
            self._not_begun.remove(fetch)
        self._straight = deque(item for item in self._straight if item.fetch is not fetch)
        for ticket in fetch.direct_reads:
            Settled(ticket).wait()
        self._queue = deque(item for item in self._queue if item.fetch is not fetch)
        for item in [item for item in self._reading if item.wanted.fetch is fetch]:
            self._reading.remove(item)
            # The slot waits for the transfer when it is taken again.
            self._ring.release(item.staged.slot, [Settled(item.staged.ticket)])
        if fetch.last_copy is not None:
            fetch.last_copy.wait()

    def take_copies_home(self, unit: Unit, part: UnitFlat) -> None:
        """Send home what was gathered into the part's range and its home holds of it, or this rank's part of that."""
        if part.range is None:
            return
        under_way, copied_chunks = self._going_home.setdefault(unit, []), part.copied_chunks
        num_before = len(under_way)
        for chunk in copied_chunks:
            content, name = part.place_of(chunk, part.range.tensor), f"{part.home.name} #{chunk}"
            record = part.home.view(Space.HOST, chunk)
            if record is not None:
                place = part.part_to_take_home(record.numel())
                if place.start < place.stop:
                    target, source = record[place], content[place]
                    under_way.append(self._transfers.to_host(target, source, Wait.PARAMETER_GATHERED, name))
            elif self._accelerator.shares_host_memory:
                under_way.append(part.home.write(chunk, content))
            else:
                under_way.append(self._write_staged(part.home, chunk, content, name))
        if len(part.sharers) > 1 and copied_chunks:
            self._arrivals.begun(part, under_way[num_before:])
        part.copies_are_current = True

    def _write_staged(self, home: Block, chunk: int, content: torch.Tensor, name: str) -> Waitable:
        while not self._ring.num_free:
            if not self._early.give_up_last():
                self._copy_first()
        slot = self._ring.acquire(self._waits)
        leaving: list[Waitable] = []
        try:
            record = slot.take(home.layout.file_nbytes(chunk))
            leaving.append(self._transfers.to_host(record, content, Wait.PARAMETER_GATHERED, name))
            self._waits.until(Wait.PARAMETER_COPY, leaving[0])
            leaving.append(home.write(chunk, record))
        finally:
            self._ring.release(slot, leaving)
        return leaving[-1]

    def wait_for_copies(self, unit: Unit) -> None:
        """Return when what `take_copies_home` began is home.

        Raises
        ------
        TierIOError
            If it could not be taken there.
        """
        try:
            wait_for_all(self._waits, Wait.PARAMETER_WRITE, self._going_home.pop(unit, ()))
        except BaseException:
            for part in unit.parts:
                part.own_changed()
            raise

    def _read_straight(self) -> None:
        """Begin to read into device memory what the host knows to be done with; in order, as memory is given back."""
        while self._straight and self._straight[0].fetch.refill_after.done():
            self._read_first_straight()

    def _read_first_straight(self) -> None:
        item = self._straight.popleft()
        item.fetch.direct_reads.append(item.home.read(item.chunk, item.target))
        self._transfers.went_straight_in(item.home.layout.record_nbytes(item.chunk))

    def _issue(self) -> None:
        while self._queue and self._has_slot():
            wanted = self._queue.popleft()
            self._reading.append(_Reading(wanted, read_into_slot(self._ring, self._waits, wanted.home, wanted.chunk)))

    def _has_slot(self) -> bool:
        # What is read ahead gives way, unless slots come free by themselves.
        return self._ring.has_room(len(self._reading)) or (not self._reading and self._early.give_up_last())

    def _copy_first(self) -> None:
        item = self._reading.popleft()
        wanted, staged = item.wanted, item.staged
        wanted.fetch.num_staged -= 1
        leaving: list[Waitable] = []
        try:
            self._waits.until(Wait.PARAMETER_READ, staged.ticket)
            target = wanted.target[: wanted.home.layout.record_nbytes(wanted.chunk)]
            # The refill was ordered when the fetch began.
            name = f"{wanted.home.name} #{wanted.chunk}"
            wanted.fetch.last_copy = self._transfers.copy_in(target, staged.record[: target.numel()], name)
            leaving.append(wanted.fetch.last_copy)
        except Exception as error:  # noqa: BLE001 - raised by who waits for that fetch, which may be another
            wanted.fetch.failure = wanted.fetch.failure or error
        except BaseException:
            # Interrupted: the transfer goes on, and the record is waited for again.
            wanted.fetch.num_staged += 1
            self._reading.appendleft(item)
            raise
        self._ring.release(staged.slot, leaving)
