"""The optimizer step of a run: which spans of which chunks are updated with what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from zerooffload.errors import ConfigError
from zerooffload.optim.scalars import AdamWScalars, AdamWSettings
from zerooffload.optim.spans import Span, cut, make_spans
from zerooffload.optim.stream import ChunkUpdate
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable

SettingsOf = Callable[[nn.Parameter, int, float], AdamWSettings | None]


class PlannedUpdate:
    """One step over all units: decided here, run by `optim.stream.StreamedUpdate`, then counted by `finished`."""

    def __init__(self, units: Sequence[Unit], settings_of: SettingsOf) -> None:
        self._flats = [
            (part, training, _settings(part, training, settings_of))
            for unit in units
            for part, training in trainable(unit)
        ]

    def chunks(self) -> Iterator[ChunkUpdate]:
        """Every chunk that has something to update, in the order of the units."""
        for part, training, settings in self._flats:
            yield from _chunk_updates(part, training, settings)

    def finished(self) -> None:
        """The values are new: count the steps, and make graphs from before stale."""
        for part, training, settings in self._flats:
            for index, setting in enumerate(settings):
                training.steps[index] += setting is not None
            if any(settings):
                part.flat.values_changed()


def _settings(part: UnitFlat, training: TrainingStates, settings_of: SettingsOf) -> list[AdamWSettings | None]:
    settings: list[AdamWSettings | None] = []
    for index, (slot, param) in enumerate(zip(part.flat.layout.slots, part.flat.params, strict=True)):
        if param.grad is None:
            training.held[index] = False
        elif not isinstance(param.grad, OffloadedGradient):
            raise ConfigError(
                f"the gradient of {slot.param.name} was replaced by a tensor: edit gradients inside"
                " zo.full_params(module, grads=True)"
            )
        held = training.held[index]
        settings.append(settings_of(param, training.steps[index] + 1, training.grad_factors[index]) if held else None)
    return settings


def _chunk_updates(
    part: UnitFlat, training: TrainingStates, settings: Iterable[AdamWSettings | None]
) -> Iterator[ChunkUpdate]:
    scalars: dict[AdamWSettings, AdamWScalars] = {}
    spans = [
        Span(span.start, span.stop, scalars.setdefault(span.settings, span.settings.scalars()))
        for span in make_spans(part.flat.layout.slots, list(settings))
    ]
    layout = part.home.layout
    for chunk in range(layout.num_chunks):
        in_chunk = cut(spans, *part.chunk_span(chunk))
        if in_chunk:
            yield ChunkUpdate(part.home, training.optimizer, training.gradient, chunk, in_chunk)
