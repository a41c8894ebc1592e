"""The last leg of a gradient: from the device to its home, joined with what the home holds, and normed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zerooffload.optim.kernels import Kernels
from zerooffload.runtime.copy_down import CopyDown
from zerooffload.sharding.unit import TrainingStates, UnitFlat
from zerooffload.telemetry import Recorder, Wait, Waitable, Waits, Work, wait_for_all
from zerooffload.tiers import Space, StagingRing, StagingSlot, Transfers


@dataclass(frozen=True)
class _Departure:
    """What of a flat arrived, and what its home held before."""

    part: UnitFlat
    training: TrainingStates
    arrived: frozenset[int]
    held_before: tuple[bool, ...]
    held_after: tuple[bool, ...]
    factors_before: tuple[float, ...]

    def is_whole(self, span: tuple[int, int]) -> bool:
        """Whether every parameter in a chunk arrived, and its home holds an unscaled gradient of all or of none."""
        indices = [index for index, _, _ in _overlaps(self.part, span, self.held_before)]
        held = {self.held_before[index] for index in indices}
        unscaled = all(self.factors_before[index] == 1.0 for index in indices) or held == {False}
        return self.arrived.issuperset(indices) and len(held) == 1 and unscaled

    def holds_any(self, span: tuple[int, int]) -> bool:
        """Whether a chunk's home held the gradient of any parameter."""
        return any(held for _, _, held in _overlaps(self.part, span, self.held_before))


class Landing:
    """Joins departing gradients with their homes.

    Parameters
    ----------
    host_kernels, device_kernels : Kernels
        Arithmetic on host memory, and on the device's.
    ring : StagingRing
        Slots for one chunk from the device and one from its home.
    """

    def __init__(
        self,
        *,
        shares_host_memory: bool,
        host_kernels: Kernels,
        device_kernels: Kernels,
        ring: StagingRing,
        transfers: Transfers,
        waits: Waits,
        recorder: Recorder,
    ) -> None:
        self._shares_host_memory = shares_host_memory
        self._host_kernels = host_kernels
        self._device_kernels = device_kernels
        self._ring = ring
        self._transfers = transfers
        self._waits = waits
        self._recorder = recorder
        self._down = CopyDown(ring, transfers, waits, recorder.in_background)
        self._writes: dict[tuple[int, int], Waitable] = {}
        self._sums: dict[tuple[int, int], torch.Tensor] = {}

    def send(
        self,
        part: UnitFlat,
        training: TrainingStates,
        memory: torch.Tensor,
        arrived: set[int],
        *,
        using: list[Waitable],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Send home the gradients `arrived` of a flat from `memory`, uint8 on the device, given to compute so far.

        Of what `memory` holds for the whole buffer, that goes which this rank updates.

        Parameters
        ----------
        using : list[Waitable]
            Gets what must be done before `memory` may be reused, also if this raises.
        then : callable, optional
            Called when all of them have joined their home, or are on their way from host memory to files.
        """
        held_before, factors_before = tuple(training.held), tuple(training.grad_factors)
        for index in arrived:
            training.held[index] = True
            training.grad_factors[index] = 1.0
        departure = _Departure(part, training, frozenset(arrived), held_before, tuple(training.held), factors_before)
        computed = None if self._shares_host_memory else self._transfers.compute_done()
        for chunk in part.own_chunks:
            # What leaves lies like the parameters, whatever dtype the home holds.
            content = part.place_of(chunk, memory)
            if computed is None:
                using += self._join(departure, chunk, content, None)
                continue
            target = self._home_to_fill(departure, chunk)
            join = partial(self._join if target is None else self._norm_at_home, departure, chunk)
            using.append(self._down.send(content, computed, f"{training.gradient.name} #{chunk}", join, target=target))
        if then is not None:
            self.call(then)

    def call(self, action: Callable[[], None]) -> None:
        """Call `action` when what was sent so far has joined its home, or is on its way from host memory to files."""
        if self._shares_host_memory:
            action()
        else:
            self._down.call(action)

    def write_of(self, part: UnitFlat, chunk: int) -> Waitable | None:
        """The write of a chunk's gradient to its home, if there is one that nobody has waited for."""
        return self._writes.get((id(part), chunk))

    def finish(self) -> None:
        """Return when everything that was sent has joined its home; writes may still be under way."""
        self._down.finish()

    def abandon(self) -> None:
        """Drop what is on its way from the device."""
        self._down.abandon()

    def drain(self) -> None:
        """Wait until everything is home."""
        self.finish()
        try:
            wait_for_all(self._waits, Wait.GRADIENT_WRITE, self._writes.values())
        finally:
            # Not before: an update that runs ahead asks for them.
            self._writes.clear()

    def forget_sums(self, part: UnitFlat) -> None:
        """The gradient of a flat changed."""
        if part.training is not None:
            for chunk in part.own_chunks:
                self._sums.pop((id(part), chunk), None)

    def square_sums(self, part: UnitFlat, training: TrainingStates) -> list[torch.Tensor]:
        """Sums of squares, by blocks, of this rank's shard of a flat's gradient; what is not held counts as zero."""
        sums = []
        for chunk in part.home.layout.chunks_of(part.shard):
            key = (id(part), chunk)
            if key not in self._sums:
                self._sums[key] = self._sums_at_home(part, training, chunk)
            sums.append(self._sums[key])
        return sums

    def _sums_at_home(self, part: UnitFlat, training: TrainingStates, chunk: int) -> torch.Tensor:
        home = training.gradient
        for space, kernels in ((Space.HOST, self._host_kernels), (Space.DEVICE, self._device_kernels)):
            record = home.view(space, chunk)
            if record is not None:
                (elements,) = home.layout.split(chunk, record).values()
                zero_absent(part, part.home.layout.chunk_range(chunk), elements, training.held)
                return kernels.square_sums(elements)
        slot = self._ring.acquire(self._waits)
        try:
            record = slot.take(home.layout.file_nbytes(chunk))
            self._read(part, training, chunk, record)
            (elements,) = home.layout.split(chunk, record).values()
            zero_absent(part, part.home.layout.chunk_range(chunk), elements, training.held)
            return self._host_kernels.square_sums(elements)
        finally:
            self._ring.release(slot)

    def _home_to_fill(self, departure: _Departure, chunk: int) -> torch.Tensor | None:
        """The home of a chunk's gradient, if all that it will hold now comes as it is to be there."""
        home, span = departure.training.gradient, departure.part.home.layout.chunk_range(chunk)
        is_same = departure.training.gradient_dtype is departure.part.flat.layout.dtype
        if not is_same or departure.holds_any(span) or not departure.is_whole(span):
            return None
        return home.view(Space.HOST, chunk)

    def _norm_at_home(
        self, departure: _Departure, chunk: int, content: torch.Tensor, _slot: StagingSlot | None
    ) -> list[Waitable]:
        """A chunk has come straight home."""
        (elements,) = departure.training.gradient.layout.split(chunk, content).values()
        zero_absent(departure.part, departure.part.home.layout.chunk_range(chunk), elements, departure.held_after)
        with self._recorder.working(Work.GRADIENT_NORM, departure.part.flat.layout.name):
            self._sums[id(departure.part), chunk] = self._host_kernels.square_sums(elements)
        return []

    def _join(
        self, departure: _Departure, chunk: int, content: torch.Tensor, slot: StagingSlot | None
    ) -> list[Waitable]:
        """Bring a chunk, now in host memory, into its home; return what still uses `content`."""
        home = departure.training.gradient
        (new,) = departure.part.home.layout.split(chunk, content).values()
        view = home.view(Space.HOST, chunk)
        key = (id(departure.part), chunk)
        span = departure.part.home.layout.chunk_range(chunk)
        if view is not None:
            (old,) = home.layout.split(chunk, view).values()
            self._join_into_old(departure, chunk, old, new)
            return []
        if departure.training.gradient_dtype is not new.dtype:
            return self._join_widened(departure, chunk, new, slot)
        if departure.holds_any(span):
            own = slot or self._ring.acquire(self._waits)
            try:
                record = own.take(home.layout.file_nbytes(chunk))
                self._read(departure.part, departure.training, chunk, record)
                (old,) = home.layout.split(chunk, record).values()
                with self._recorder.working(Work.GRADIENT_ACCUMULATION, departure.part.flat.layout.name):
                    if departure.is_whole(span):
                        self._sums[key] = self._arrive(departure, span, new, old)
                    else:
                        self._add(departure, chunk, old, new, into_old=False)
                        self._sums.pop(key, None)
            finally:
                if slot is None:
                    self._ring.release(own)
        else:
            self._sums.pop(key, None)
        return [self._write(departure, chunk, content, new)]

    def _join_widened(
        self, departure: _Departure, chunk: int, new: torch.Tensor, slot: StagingSlot | None
    ) -> list[Waitable]:
        """Join a chunk with a home that is elsewhere and holds more bits; return what still uses `slot`."""
        home = departure.training.gradient
        own = slot or self._ring.acquire(self._waits)
        writes: list[Waitable] = []
        try:
            record = own.take(home.layout.file_nbytes(chunk))
            if departure.holds_any(departure.part.home.layout.chunk_range(chunk)):
                self._read(departure.part, departure.training, chunk, record)
            (old,) = home.layout.split(chunk, record).values()
            self._join_into_old(departure, chunk, old, new)
            writes.append(self._write(departure, chunk, record, old))
        finally:
            if slot is None:
                self._ring.release(own, writes)
        return writes if slot is not None else []

    def _join_into_old(self, departure: _Departure, chunk: int, old: torch.Tensor, new: torch.Tensor) -> None:
        """Join what arrived with what its home holds, there; what it holds of no gradient stays undefined."""
        key, span = (id(departure.part), chunk), departure.part.home.layout.chunk_range(chunk)
        self._sums.pop(key, None)
        with self._recorder.working(Work.GRADIENT_ACCUMULATION, departure.part.flat.layout.name):
            if departure.is_whole(span):
                self._sums[key] = self._arrive(departure, span, old, new)
            else:
                self._add(departure, chunk, old, new, into_old=True)

    def _write(self, departure: _Departure, chunk: int, record: torch.Tensor, elements: torch.Tensor) -> Waitable:
        """Send a joined chunk home, normed if it is not yet."""
        key, span = (id(departure.part), chunk), departure.part.home.layout.chunk_range(chunk)
        if key not in self._sums:
            zero_absent(departure.part, span, elements, departure.held_after)
            with self._recorder.working(Work.GRADIENT_NORM, departure.part.flat.layout.name):
                self._sums[key] = self._host_kernels.square_sums(elements)
        earlier = self._writes.pop(key, None)
        if earlier is not None:
            # Two writes to one place may land in either order.
            self._waits.until(Wait.GRADIENT_WRITE, earlier)
        write = departure.training.gradient.write(chunk, record)
        self._writes[key] = write
        return write

    def _read(self, part: UnitFlat, training: TrainingStates, chunk: int, record: torch.Tensor) -> None:
        write = self._writes.get((id(part), chunk))
        if write is not None:
            self._waits.until(Wait.GRADIENT_WRITE, write)
            del self._writes[id(part), chunk]
        self._waits.until(Wait.GRADIENT_READ, training.gradient.read(chunk, record))

    def _arrive(
        self, departure: _Departure, span: tuple[int, int], target: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        """Join a whole chunk's `source` with `target`, and sum the squares, in one pass."""
        for elements in (target, source):
            zero_absent(departure.part, span, elements, departure.held_after)
        kernels = self._host_kernels
        return (kernels.add if departure.holds_any(span) else kernels.replace)(target, source)

    def _add(self, departure: _Departure, chunk: int, old: torch.Tensor, new: torch.Tensor, *, into_old: bool) -> None:
        """Join `new` and `old` into one of them, parameter by parameter."""
        span = departure.part.home.layout.chunk_range(chunk)
        for index, part, held in _overlaps(departure.part, span, departure.held_before):
            source, target = (new[part], old[part]) if into_old else (old[part], new[part])
            if index in departure.arrived and held:
                factor = departure.factors_before[index]
                if factor != 1.0:
                    old[part].mul_(factor)
                self._host_kernels.add(target, source)
            elif (index in departure.arrived) == into_old and (index in departure.arrived or held):
                target.copy_(source)


def _overlaps(part: UnitFlat, span: tuple[int, int], flags: Sequence[bool]) -> list[tuple[int, slice, bool]]:
    """The parameters in a chunk: index, place counted from the chunk's start, flag."""
    start, stop = span
    return [
        (index, slice(max(slot.start, start) - start, min(slot.stop, stop) - start), flags[index])
        for index, slot in enumerate(part.flat.layout.slots)
        if slot.start < stop and slot.stop > start
    ]


def zero_absent(part: UnitFlat, span: tuple[int, int], elements: torch.Tensor, held: Sequence[bool]) -> None:
    """Zero what belongs to no held gradient, padding included, so that it adds nothing to the norm."""
    position = 0
    for _, place, is_held in _overlaps(part, span, held):
        if is_held:
            elements[position : place.start].zero_()
            position = place.stop
    elements[position:].zero_()
