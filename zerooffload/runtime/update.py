"""The optimizer step of a flat: which spans of which chunks are updated with what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zerooffload.errors import ConfigError
from zerooffload.optim.optimizer import ScalarsOf
from zerooffload.optim.rules import StepScalars
from zerooffload.optim.spans import cut, make_spans
from zerooffload.optim.stream import ChunkUpdate
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable
from zerooffload.telemetry import Waitable
from zerooffload.tiers import Block


@dataclass(frozen=True, eq=False)
class FlatUpdate:
    """What one step does to a flat.

    Attributes
    ----------
    scalars : tuple
        For each parameter, what it is updated with; None if it is not.
    """

    part: UnitFlat
    training: TrainingStates
    scalars: tuple[StepScalars | None, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not any(self.scalars)

    @property
    def blocks(self) -> tuple[Block, Block]:
        """The homes of what it changes."""
        return self.part.home, self.training.optimizer

    @property
    def needs_device(self) -> bool:
        """Whether it takes the device's queues, and so the thread that trains."""
        return any(block.needs_device for block in (*self.blocks, self.training.gradient))

    def chunks(
        self,
        *,
        backwards: bool,
        ahead: bool,
        gradient_written: Callable[[int], Waitable | None],
    ) -> Iterator[ChunkUpdate]:
        """Every chunk that has something to update.

        Parameters
        ----------
        gradient_written : callable
            Tells, of a chunk, what must be over before its gradient can be read.
        """
        part, training = self.part, self.training
        spans = make_spans(part.flat.layout.slots, self.scalars)
        for chunk in reversed(part.own_chunks) if backwards else part.own_chunks:
            start, stop = part.home.layout.chunk_range(chunk)
            in_chunk = cut(spans, start, stop)
            if in_chunk:
                yield ChunkUpdate(
                    part.home,
                    training.optimizer,
                    training.gradient,
                    chunk,
                    start,
                    in_chunk,
                    ahead=ahead,
                    gradient_written=gradient_written(chunk),
                    name=part.flat.layout.name,
                )

    def count(self) -> None:
        """The step is decided: count it, and make graphs from before stale."""
        for index, scalar in enumerate(self.scalars):
            self.training.steps[index] += scalar is not None
        self.part.flat.values_changed()
        self.part.own_changed()
        if not self.part.copies_are_current:
            self.part.show_at_home()


def plan_update(units: Sequence[Unit], scalars_of: ScalarsOf) -> list[FlatUpdate]:
    """One step over all units, in their order; flats that it leaves alone are left out.

    Raises
    ------
    ConfigError
        If a gradient was replaced by a tensor of the user's. Of parameters without one, the flags are cleared.
    """
    planned = [
        FlatUpdate(part, training, _scalars(part, training, scalars_of))
        for unit in units
        for part, training in trainable(unit)
    ]
    return [update for update in planned if not update.is_empty]


def _scalars(part: UnitFlat, training: TrainingStates, scalars_of: ScalarsOf) -> tuple[StepScalars | None, ...]:
    scalars: list[StepScalars | None] = []
    for index, (slot, param) in enumerate(zip(part.flat.layout.slots, part.flat.params, strict=True)):
        if param.grad is None:
            training.held[index] = False
        elif not isinstance(param.grad, OffloadedGradient):
            raise ConfigError(
                f"the gradient of {slot.param.name} was replaced by a tensor: edit gradients inside"
                " zo.full_params(module, grads=True)"
            )
        held = training.held[index]
        scalars.append(scalars_of(param, training.steps[index] + 1, training.grad_factors[index]) if held else None)
    return tuple(scalars)
