"""The gradient path: from autograd to the gradients' homes, as they appear.

[Note: collection and departure]
Where the device can use a gradient's home, each parameter's gradient is added to it at once. Elsewhere the gradients of
a flat gather in a collection buffer on the device; when all have arrived (or room is wanted, or backward ends) the
buffer departs: chunk by chunk it is brought to the host, joined with what the home holds, normed and sent home. The
buffer's memory is given back when nothing reads it any more.

With several ranks a departing buffer is reduced first, and of the mean only what this rank updates goes home: its
shard, or, where it updates everything, all of it, gathered from the ranks that have it. Buffers depart in the reverse
order of the model on every rank, each flat once in each backward, with zeros for what did not arrive: which gradients a
rank has got, and when, must not decide which collectives it starts. At the end of backward the ranks agree on which
parameters got a gradient anywhere.

[Note: gradients of 16 bits]
They leave the device in their parameter's dtype: buffers, copies and reductions are in it. Where several backwards are
said to add up (`OffloadConfig.accumulation_steps`), the home holds fp32, and what arrives is widened and added in one
pass, so that only autograd's own result and, with several ranks, their mean are rounded to 16 bits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from zerooffload.accelerator import DeviceRange
from zerooffload.errors import BudgetError, ConfigError, InternalError, TierIOError
from zerooffload.formats import format_bytes
from zerooffload.runtime.landing import Landing, zero_absent
from zerooffload.runtime.reduction_order import ReductionOrder
from zerooffload.runtime.resources import Parts
from zerooffload.sharding.collectives import Collectives
from zerooffload.sharding.local_tensors import local_gradient
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable
from zerooffload.telemetry import Wait, Waitable, Work, wait_for_all
from zerooffload.tiers import Space, dtype_name

_log = logging.getLogger("zerooffload")

_MOST_HOLDERS = 3
"""That a message names."""


class _Collection:
    """A flat's gradients gathering on the device."""

    def __init__(self, part: UnitFlat, training: TrainingStates, memory: DeviceRange) -> None:
        self.part = part
        self.training = training
        self.memory = memory
        self.arrived: set[int] = set()
        self.leaving: list[Waitable] = []
        layout = part.flat.layout
        elements = layout.elements(memory.tensor)
        self.views = [elements[slot.start : slot.stop].view(slot.param.shape) for slot in layout.slots]


class GradientPath:
    """Takes gradients from autograd and keeps what their homes hold.

    Parameters
    ----------
    window_nbytes : int
        Device bytes that filled collection buffers may take together.
    changed, is_complete : callable
        Told when a flat's gradient is not what it was any more, and when all of a backward's have come to it.
    """

    def __init__(
        self,
        window_nbytes: int,
        landing: Landing,
        collectives: Collectives,
        units: Sequence[Unit],
        parts: Parts,
        *,
        changed: Callable[[UnitFlat], None],
        is_complete: Callable[[UnitFlat, TrainingStates], None],
    ) -> None:
        self._changed = changed
        self._is_complete = is_complete
        self._come: dict[UnitFlat, set[int]] = {}
        self._whole: set[UnitFlat] = set()
        self._free_nbytes = self._window_nbytes = window_nbytes
        self._collectives = collectives
        self._units = units
        self._flats = [flat for unit in units for flat in trainable(unit)]
        self._order = ReductionOrder(units) if collectives.world_size > 1 else None
        self._held_before: dict[int, list[bool]] = {}
        self._arrived: dict[int, set[int]] = {}
        self._landing = landing
        self._waits = parts.waits
        self._recorder = parts.recorder
        self._open: dict[int, _Collection] = {}
        self._leaving: deque[_Collection] = deque()
        self._is_begun = False
        self._lost: list[torch.Tensor] = []
        self._loss: BaseException | None = None
        self._has_told_of_rounding = False

    def begin(self) -> None:
        """A backward begins: make each `grad` fit to be accumulated into. Which units it reaches nobody knows."""
        self._is_begun = True
        for part, training in self._flats:
            self._changed(part)
            for index, param in enumerate(part.flat.params):
                if isinstance(param.grad, OffloadedGradient):
                    # Autograd would add into it; what is held at home is added there.
                    param.grad = None
                else:
                    training.held[index] = False
                    training.grad_factors[index] = 1.0

    def arrived(self, part: UnitFlat, training: TrainingStates, index: int) -> None:
        """Autograd has finished the gradient of a parameter: take it."""
        param = part.flat.params[index]
        if param.grad is None:
            raise InternalError("a gradient's hook ran without a gradient")
        grad, param.grad = local_gradient(param, param.grad.to_dense() if param.grad.is_sparse else param.grad), None
        if training.held[index]:
            self._tell_of_rounding(training.gradient_dtype)
        home = training.gradient.whole(Space.DEVICE)
        with self._recorder.working(Work.GRADIENT_ACCUMULATION, part.flat.layout.name):
            if part.collection is None and home is not None:
                self._add_at_home(part, training, index, grad, home)
            else:
                self._collect(part, training, index, grad)
        param.grad = OffloadedGradient(param)

    def end_backward(self) -> None:
        """Backward is over: send what has gathered, and show what is held."""
        if self._order is None:
            for collection in list(self._open.values()):
                self._depart(collection)
        else:
            self._depart_rest(self._order)
        for part, training in self._flats:
            for param, held in zip(part.flat.params, training.held, strict=True):
                if held and param.grad is None:
                    param.grad = OffloadedGradient(param)
        for part, training in self._flats:
            if any(training.held) and part not in self._whole:
                self._landing.call(partial(self._is_complete, part, training))
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._is_begun = False
        self._come.clear()
        self._whole.clear()

    def settle(self) -> None:
        """Return when the gradients of the backwards before have joined those at home.

        Raises
        ------
        TierIOError
            If they could not.
        """
        try:
            self._landing.finish()
        except BaseException as error:
            self._lose(error, [part for part, _ in self._flats])
            raise

    def abandon_backward(self) -> None:
        """A backward raised: drop what was gathering, and remember which gradients it left."""
        self._landing.abandon()
        for collection in self._open.values():
            collection.memory.empty()
            self._free_nbytes += collection.memory.nbytes
        self._open.clear()
        if self._order is not None:
            self._order = ReductionOrder(self._units)
        for part, training in self._flats if self._is_begun else ():
            for index, param in enumerate(part.flat.params):
                if param.grad is None:
                    # Cleared for autograd, or since then by the user: either way there is none.
                    training.held[index] = False
                else:
                    self._lost.append(param)
        self._forget_backward()

    def check_whole(self) -> None:
        """See that no gradients are left of a backward that raised, or that could not be brought home.

        Raises
        ------
        ConfigError
            If some are: they are those of a part of the model, or not what they should be.
        """
        if any(param.grad is not None for param in self._lost):
            raise ConfigError(
                "a backward raised, or its gradients could not be brought home, so what is left of them is not whole:"
                " call zero_grad() first"
            ) from self._loss
        self._lost.clear()
        self._loss = None

    def drain(self) -> None:
        """Wait until every gradient is home."""
        try:
            self._landing.drain()
        except BaseException as error:
            self._lose(error, [part for part, _ in self._flats])
            raise
        self.give_back()

    def give_back(self) -> None:
        """Wait until no gradient leaves the device any more, and give the memory back in which they were gathered."""
        while self._leaving:
            self._give_back_oldest()

    def _lose(self, error: BaseException, parts: Sequence[UnitFlat]) -> None:
        """The gradients of these flats are not what they should be: refuse them until they are forgotten."""
        self._loss = error
        for part in parts:
            self._lost.extend(part.flat.params)

    def changed(self, part: UnitFlat) -> None:
        """The gradient of a flat was changed at home."""
        self._landing.forget_sums(part)
        self._changed(part)

    def discard(self, part: UnitFlat, index: int) -> None:
        """Forget a parameter's gradient."""
        if part.training is not None:
            with suppress(TierIOError):
                # What could not be brought home is not wanted.
                self._landing.finish()
            part.training.held[index] = False
            part.training.grad_factors[index] = 1.0
            self._landing.forget_sums(part)
            self._changed(part)

    def _tell_of_rounding(self, dtype: torch.dtype) -> None:
        """Several backwards add up in `dtype`: tell, once, if small gradients are lost in that."""
        if dtype is not torch.float32 and not self._has_told_of_rounding:
            self._has_told_of_rounding = True
            _log.warning(
                "gradients of several backwards add up in %s, in which small ones are lost: set"
                " OffloadConfig(accumulation_steps=N), the number of backwards before each optimizer.step(), and they"
                " add up in fp32",
                dtype_name(dtype),
            )

    def _add_at_home(
        self, part: UnitFlat, training: TrainingStates, index: int, grad: torch.Tensor, home: torch.Tensor
    ) -> None:
        layout = part.flat.layout
        slot = layout.slots[index]
        target = layout.elements(home, training.gradient_dtype)[slot.start : slot.stop].view(slot.param.shape)
        if training.held[index]:
            apply_factor(target, training, index)
            target.add_(grad)
        else:
            target.copy_(grad)
        training.held[index] = True
        self._landing.forget_sums(part)
        come = self._come.setdefault(part, set())
        come.add(index)
        if len(come) == len(part.flat.params):
            self._whole.add(part)
            self._is_complete(part, training)

    def _collect(self, part: UnitFlat, training: TrainingStates, index: int, grad: torch.Tensor) -> None:
        collection = self._open.get(id(part)) or self._open_collection(part, training)
        if index in collection.arrived:
            collection.views[index].add_(grad)
        else:
            collection.views[index].copy_(grad)
            collection.arrived.add(index)
        if len(collection.arrived) < len(collection.views):
            return
        if self._order is None:
            self._depart(collection)
        else:
            for other, _ in self._order.complete(part):
                self._depart(self._open[id(other)])

    def _depart_rest(self, order: ReductionOrder) -> None:
        """Reduce what is left, zeros where nothing arrived, and agree on what is held."""
        for part, training in order.rest():
            self._depart(self._open.get(id(part)) or self._open_collection(part, training))
        mine = [sorted(self._arrived.pop(id(part), set())) for part, _ in self._flats]
        everyones = self._collectives.gather_objects(mine)
        for position, (part, training) in enumerate(self._flats):
            arrived = {index for of_rank in everyones for index in of_rank[position]}
            before = self._held_before.pop(id(part))
            training.held[:] = [held or index in arrived for index, held in enumerate(before)]

    def _open_collection(self, part: UnitFlat, training: TrainingStates) -> _Collection:
        memory = part.collection
        if memory is None:
            raise InternalError(f"{part.flat.layout.name} collects gradients without a buffer")
        # The part's own buffer may still be leaving with an earlier content.
        while any(other.part is part for other in self._leaving) or (
            self._leaving and memory.nbytes > self._free_nbytes
        ):
            self._give_back_oldest()
        while self._order is None and memory.nbytes > self._free_nbytes and self._open:
            # Gradients of several units gather at the same time: send what is there of the oldest.
            self._depart(next(iter(self._open.values())))
            self._give_back_oldest()
        if memory.nbytes > self._free_nbytes:
            raise BudgetError(self._too_many(part, memory))
        memory.fill()
        self._free_nbytes -= memory.nbytes
        collection = _Collection(part, training, memory)
        self._open[id(part)] = collection
        return collection

    def _too_many(self, part: UnitFlat, memory: DeviceRange) -> str:
        """That gradients gather for which there is no room: what needs it, what holds it, and what is enough."""
        largest = sorted(self._open.values(), key=lambda collection: -collection.memory.nbytes)[:_MOST_HOLDERS]
        holders = ", ".join(f"{one.part.flat.layout.name} {format_bytes(one.memory.nbytes)}" for one in largest)
        every = sum(flat.collection.nbytes for flat, _ in self._flats if flat.collection is not None)
        return (
            f"gradient collection on the device: {part.flat.layout.name} needs {format_bytes(memory.nbytes)},"
            f" {format_bytes(self._free_nbytes)} are free of {format_bytes(self._window_nbytes)} (held by {holders})."
            " With several ranks gradients leave in one order, and here those of several units gather at the same time:"
            f" raise device_memory (on a CPU: host_memory) by {memory.nbytes - self._free_nbytes} bytes, or, for"
            f" gradients in any order, by {every - self._window_nbytes}"
        )

    def _depart(self, collection: _Collection) -> None:
        del self._open[id(collection.part)]
        part, arrived = collection.part, collection.arrived
        if self._order is not None:
            layout = part.flat.layout
            elements = layout.elements(collection.memory.tensor)
            zero_absent(part, (0, layout.numel), elements, [index in arrived for index in range(len(layout.slots))])
            self._collectives.reduce_scatter(elements, layout.name)
            if len(part.own) > 1:
                # Every rank updates everything.
                self._collectives.all_gather(elements, layout.name)
            self._held_before[id(part)] = list(collection.training.held)
            self._arrived[id(part)] = arrived
            arrived = set(range(len(layout.slots)))
        then: Callable[[], None] | None = None
        if len(collection.arrived) == len(collection.views):
            self._whole.add(part)
            then = partial(self._is_complete, part, collection.training)
        # Before anything is in flight: the memory must be waited for also if sending fails half-way.
        self._leaving.append(collection)
        self._landing.send(
            part,
            collection.training,
            collection.memory.tensor,
            arrived,
            using=collection.leaving,
            then=then,
        )

    def _give_back_oldest(self) -> None:
        collection = self._leaving.popleft()
        try:
            wait_for_all(self._waits, Wait.GRADIENT_MEMORY, collection.leaving)
        except BaseException as error:
            self._lose(error, [collection.part])
            raise
        finally:
            collection.memory.empty()
            self._free_nbytes += collection.memory.nbytes


def apply_factor(target: torch.Tensor, training: TrainingStates, index: int) -> None:
    """A clipped gradient that is added to must be what clipping made of it."""
    if training.grad_factors[index] != 1.0:
        target.mul_(training.grad_factors[index])
        training.grad_factors[index] = 1.0
