"""The optimizer step of a run: which spans of which chunks are updated with what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerooffload.errors import ConfigError
from zerooffload.optim.optimizer import ScalarsOf
from zerooffload.optim.rules import StepScalars
from zerooffload.optim.spans import cut, make_spans
from zerooffload.optim.stream import ChunkUpdate
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable


class PlannedUpdate:
    """One step over all units: decided here, run by `optim.stream.StreamedUpdate`, then counted by `finished`.

    Parameters
    ----------
    backwards : bool
        Go through units and chunks from the last to the first.
    """

    def __init__(self, units: Sequence[Unit], scalars_of: ScalarsOf, *, backwards: bool = False) -> None:
        self._backwards = backwards
        self._flats = [
            (part, training, _scalars(part, training, scalars_of))
            for unit in units
            for part, training in trainable(unit)
        ]

    def chunks(self) -> Iterator[ChunkUpdate]:
        """Every chunk that has something to update, in the order of the units."""
        for part, training, scalars in reversed(self._flats) if self._backwards else self._flats:
            yield from _chunk_updates(part, training, scalars, backwards=self._backwards)

    def finished(self) -> None:
        """The values are new: count the steps, and make graphs from before stale."""
        for part, training, scalars in self._flats:
            for index, scalar in enumerate(scalars):
                training.steps[index] += scalar is not None
            if any(scalars):
                part.flat.values_changed()


def _scalars(part: UnitFlat, training: TrainingStates, scalars_of: ScalarsOf) -> list[StepScalars | None]:
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
    return scalars


def _chunk_updates(
    part: UnitFlat, training: TrainingStates, scalars: Sequence[StepScalars | None], *, backwards: bool
) -> Iterator[ChunkUpdate]:
    spans = make_spans(part.flat.layout.slots, scalars)
    chunks = range(part.home.layout.num_chunks)
    for chunk in reversed(chunks) if backwards else chunks:
        start, stop = part.chunk_span(chunk)
        in_chunk = cut(spans, start, stop)
        if in_chunk:
            yield ChunkUpdate(part.home, training.optimizer, training.gradient, chunk, start, in_chunk)
