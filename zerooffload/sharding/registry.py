"""The one global of the package: which run owns a parameter.

It is how `zo.AdamW(model.parameters())` finds its run. Weak both ways: it keeps neither parameter nor run alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerooffload.sharding.stored import parts_of

if TYPE_CHECKING:
    from zerooffload.sharding.unit import Unit, UnitFlat


@dataclass(frozen=True)
class Residence:
    """Where a parameter lives: run, unit, flat and slot."""

    run: Any
    unit: Unit
    part: UnitFlat
    slot_index: int


@dataclass(frozen=True)
class _WeakResidence:
    run: weakref.ref[Any]
    unit: weakref.ref[Unit]
    part: weakref.ref[UnitFlat]
    slot_index: int


_residences: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(run: object, unit: Unit) -> None:
    """`run` owns all parameters of `unit` from now on."""
    for part in unit.parts:
        for index, param in enumerate(part.flat.params):
            _residences[param] = _WeakResidence(weakref.ref(run), weakref.ref(unit), weakref.ref(part), index)


def forget(unit: Unit) -> None:
    """Nobody owns the parameters of `unit` any more."""
    for param in unit.parameters():
        _residences.pop(param, None)


def residence_of(param: torch.Tensor) -> Residence | None:
    """Where `param` lives, or None for one that is not offloaded. What is made of others lives where the first does."""
    for part in parts_of(param).values():
        return residence_of(part)
    weak = _residences.get(param)
    if weak is None:
        return None
    run, unit, part = weak.run(), weak.unit(), weak.part()
    if run is None or unit is None or part is None:
        return None
    return Residence(run, unit, part, weak.slot_index)
