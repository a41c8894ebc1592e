"""Beginning a flat's update as soon as its gradient is complete, expecting what `optimizer.step()` will say.

Expected are the optimizer's settings as they are, the loss scale of the step before, and that clipping changes nothing.
`UpdateQueue.take_ahead` compares the scalars that the kernel was given with those of the step; what differs is redone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from zerooffload.optim.optimizer import OffloadedOptimizer, ScalarsOf
from zerooffload.runtime.landing import Landing
from zerooffload.runtime.update import FlatUpdate
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable


class AheadUpdates:
    """Begins updates ahead in a backward that is expected to be the last before the step.

    Gradients may be complete when the thread that trains is through with the backward, and on another thread.

    Parameters
    ----------
    optimizers : callable
        The optimizers of the run that are alive.

    Attributes
    ----------
    expected_factor : float
        What the step multiplies gradients with if it does not clip: 1 over the loss scale.
    expected_max_norm : float
        What the step clips by; infinite if it does not.
    """

    def __init__(
        self, queue: UpdateQueue, landing: Landing, optimizers: Callable[[], Sequence[torch.optim.Optimizer]]
    ) -> None:
        self.expected_factor = 1.0
        self.expected_max_norm = math.inf
        self._queue = queue
        self._landing = landing
        self._optimizers = optimizers
        self._scalars_of: ScalarsOf | None = None
        self._urgency: dict[UnitFlat, int] = {}
        self._square_sum = 0.0

    def begin(self, order: Sequence[Unit]) -> None:
        """One begins that is expected to be the last; `order` is that of the units in the next forward."""
        self.end()
        optimizers = self._optimizers()
        # With several, each step() is one of its own.
        if len(optimizers) == 1 and isinstance(optimizers[0], OffloadedOptimizer):
            self._scalars_of = optimizers[0].scalars_of()
        self._urgency = urgencies(order)
        self._square_sum = 0.0

    def end(self) -> None:
        """No further update begins."""
        self._scalars_of = None

    def gradient_is_complete(self, part: UnitFlat, training: TrainingStates) -> None:
        """All of a flat's gradients of this backward are home, or on their way to files."""
        scalars_of = self._scalars_of
        if scalars_of is None or not _has_second_places(part, training):
            return
        if math.isfinite(self.expected_max_norm):
            self._square_sum += sum(float(sums.sum()) for sums in self._landing.square_sums(part, training))
        if math.sqrt(self._square_sum) * abs(self.expected_factor) > self.expected_max_norm:
            # The step will clip: from here on nothing would be right.
            self.end()
            self._queue.drop_ahead()
            return
        expected = (
            scalars_of(param, training.steps[index] + 1, self.expected_factor) if training.held[index] else None
            for index, param in enumerate(part.flat.params)
        )
        update = FlatUpdate(part, training, tuple(expected))
        if not update.is_empty and not update.needs_device:
            self._queue.begin_ahead(update, self._urgency.get(part, len(self._urgency)))


def urgencies(order: Sequence[Unit]) -> dict[UnitFlat, int]:
    """How soon flats are needed, where units are in this order: the least first."""
    flats = (part for unit in order for part, _ in trainable(unit))
    return {part: position for position, part in enumerate(flats)}


def _has_second_places(part: UnitFlat, training: TrainingStates) -> bool:
    return all(block.num_places > 1 for block in (part.home, training.optimizer))
