"""The gradient path: from autograd to the gradients' homes, as they appear.

[Note: collection and departure]
Where the device can use a gradient's home, each parameter's gradient is added to it at once. Elsewhere the gradients of
a flat gather in a collection buffer on the device; when all have arrived (or room is wanted, or backward ends) the
buffer departs: chunk by chunk it is brought to the host, joined with what the home holds, normed and sent home. The
buffer's memory is given back when nothing reads it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from zerooffload.accelerator import DeviceRange
from zerooffload.errors import BudgetError, InternalError
from zerooffload.formats import format_bytes
from zerooffload.runtime.landing import Landing
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat
from zerooffload.telemetry import Recorder, Wait, Waitable, Waits, Work, wait_for_all
from zerooffload.tiers import Space


class _Collection:
    """A flat's gradients gathering on the device."""

    def __init__(self, part: UnitFlat, training: TrainingStates, memory: DeviceRange) -> None:
        self.part = part
        self.training = training
        self.memory = memory
        self.arrived: set[int] = set()
        self.leaving: list[Waitable] = []
        layout = part.flat.layout
        elements = memory.tensor[: layout.nbytes].view(layout.dtype)
        self.views = [elements[slot.start : slot.stop].view(slot.param.shape) for slot in layout.slots]


class GradientPath:
    """Takes gradients from autograd and keeps what their homes hold.

    Parameters
    ----------
    window_nbytes : int
        Device bytes that filled collection buffers may take together.
    """

    def __init__(
        self,
        window_nbytes: int,
        landing: Landing,
        waits: Waits,
        recorder: Recorder,
    ) -> None:
        self._free_nbytes = window_nbytes
        self._landing = landing
        self._waits = waits
        self._recorder = recorder
        self._open: dict[int, _Collection] = {}
        self._leaving: deque[_Collection] = deque()
        self._begun: dict[Unit, None] = {}

    def begin(self, unit: Unit) -> None:
        """Backward reaches `unit`: make `grad` fit to be accumulated into, once in each backward."""
        if unit in self._begun:
            return
        self._begun[unit] = None
        for part, training in trainable(unit):
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
        grad, param.grad = param.grad.to_dense() if param.grad.is_sparse else param.grad, None
        home = training.gradient.whole(Space.DEVICE)
        with self._recorder.working(Work.GRADIENT_ACCUMULATION):
            if home is not None:
                self._add_at_home(part, training, index, grad, home)
            else:
                self._collect(part, training, index, grad)
        param.grad = OffloadedGradient(param)

    def end_backward(self) -> None:
        """Backward is over: send what has gathered, and show what is held."""
        for collection in list(self._open.values()):
            self._depart(collection)
        for unit in self._begun:
            for part, training in trainable(unit):
                for param, held in zip(part.flat.params, training.held, strict=True):
                    if held and param.grad is None:
                        param.grad = OffloadedGradient(param)
        self._begun.clear()
        self._landing.finish()

    def drain(self) -> None:
        """Wait until every gradient is home."""
        self._landing.drain()
        while self._leaving:
            self._give_back_oldest()

    def changed(self, part: UnitFlat) -> None:
        """The gradient of a flat was changed at home."""
        self._landing.forget_sums(part)

    def discard(self, part: UnitFlat, index: int) -> None:
        """Forget a parameter's gradient."""
        if part.training is not None:
            part.training.held[index] = False
            part.training.grad_factors[index] = 1.0

    def _add_at_home(
        self, part: UnitFlat, training: TrainingStates, index: int, grad: torch.Tensor, home: torch.Tensor
    ) -> None:
        layout = part.flat.layout
        slot = layout.slots[index]
        target = home[: layout.nbytes].view(layout.dtype)[slot.start : slot.stop].view(slot.param.shape)
        if training.held[index]:
            apply_factor(target, training, index)
            target.add_(grad)
        else:
            target.copy_(grad)
        training.held[index] = True
        self._landing.forget_sums(part)

    def _collect(self, part: UnitFlat, training: TrainingStates, index: int, grad: torch.Tensor) -> None:
        collection = self._open.get(id(part)) or self._open_collection(part, training)
        if index in collection.arrived:
            collection.views[index].add_(grad)
        else:
            collection.views[index].copy_(grad)
            collection.arrived.add(index)
        if len(collection.arrived) == len(collection.views):
            self._depart(collection)

    def _open_collection(self, part: UnitFlat, training: TrainingStates) -> _Collection:
        memory = part.collection
        if memory is None:
            raise InternalError(f"{part.flat.layout.name} collects gradients without a buffer")
        # The part's own buffer may still be leaving with an earlier content.
        while any(other.part is part for other in self._leaving) or (
            self._leaving and memory.nbytes > self._free_nbytes
        ):
            self._give_back_oldest()
        while memory.nbytes > self._free_nbytes and self._open:
            # Gradients of several units gather at the same time: send what is there of the oldest.
            self._depart(next(iter(self._open.values())))
            self._give_back_oldest()
        if memory.nbytes > self._free_nbytes:
            raise BudgetError(
                f"gradient collection: {part.flat.layout.name} needs {format_bytes(memory.nbytes)},"
                f" {format_bytes(self._free_nbytes)} are free"
            )
        memory.fill()
        self._free_nbytes -= memory.nbytes
        collection = _Collection(part, training, memory)
        self._open[id(part)] = collection
        return collection

    def _depart(self, collection: _Collection) -> None:
        del self._open[id(collection.part)]
        collection.leaving = self._landing.send(
            collection.part, collection.training, collection.memory.tensor, collection.arrived
        )
        self._leaving.append(collection)

    def _give_back_oldest(self) -> None:
        collection = self._leaving.popleft()
        try:
            wait_for_all(self._waits, Wait.GRADIENT_WRITE, collection.leaving)
        finally:
            collection.memory.empty()
            self._free_nbytes += collection.memory.nbytes


def trainable(unit: Unit) -> Iterable[tuple[UnitFlat, TrainingStates]]:
    """The flats of a unit that are trained."""
    for part in unit.parts:
        if part.training is not None:
            yield part, part.training


def apply_factor(target: torch.Tensor, training: TrainingStates, index: int) -> None:
    """A clipped gradient that is added to must be what clipping made of it."""
    if training.grad_factors[index] != 1.0:
        target.mul_(training.grad_factors[index])
        training.grad_factors[index] = 1.0
