"""Contiguous ranges of a flat buffer that are updated with one set of hyperparameters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zerooffload.sharding.layout import Slot

T = TypeVar("T")


@dataclass(frozen=True)
class Span(Generic[T]):
    """Elements `[start, stop)` and what they are updated with."""

    start: int
    stop: int
    settings: T


def make_spans(slots: Sequence[Slot], settings: Sequence[T | None]) -> list[Span[T]]:
    """Join neighbouring parameters of equal settings; None means that a parameter is not updated.

    Padding between two parameters is left out, so parameters with padding between them stay apart.
    """
    spans: list[Span[T]] = []
    for slot, setting in zip(slots, settings, strict=True):
        if setting is None or slot.start == slot.stop:
            continue
        if spans and spans[-1].stop == slot.start and spans[-1].settings == setting:
            spans[-1] = Span(spans[-1].start, slot.stop, setting)
        else:
            spans.append(Span(slot.start, slot.stop, setting))
    return spans


def cut(spans: Iterable[Span[T]], start: int, stop: int) -> list[Span[T]]:
    """The parts of `spans` in `[start, stop)`, counted from `start`."""
    return [
        Span(max(span.start, start) - start, min(span.stop, stop) - start, span.settings)
        for span in spans
        if span.start < stop and span.stop > start
    ]
