"""The table of what works with what: its cells.

A cell is a training of one kind of model, in one kind of loop, with its states in one place, on one rank, or on several
in one of ZeRO's stages, each with batches of its own. It is equal, bit for bit, to the same training in plain PyTorch
with the reference optimizer, or refused with the error that the page names.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from support.compatible_loops import LOOPS, NUM_STEPS
from support.compatible_models import MODELS, KindOfModel, add_up_by_block
from support.environments import Homes, least_memory, simulated_devices
from support.pairwise import Pairs, covering, pairs_of
from support.reference_training import Outcome, Recipe, differences, train_offloaded
from support.thoroughness import EXHAUSTIVE
from torch import nn

import zerooffload as zo

BASE_LOOP = "two micro-steps, clipping"
LOOP_MODELS = ("Llama", "LoRA", "packed experts")
"""All loops go with these; the other models with the base loop, unless all is gone through."""
_AMPLE = "16MiB"


@dataclass(frozen=True)
class Place:
    """Where the states are.

    Attributes
    ----------
    homes : Homes
    what : str
        For the page.
    is_simulated : bool
        On a device with memory of its own, whose copies come as late as they may.
    """

    homes: Homes
    what: str
    is_simulated: bool = False

    @property
    def moves(self) -> bool:
        """Whether parameters leave the device."""
        return self.is_simulated or "nvme" in self.homes


PLACES: dict[str, Place] = {
    "host": Place(("host", "host", "host"), "a CPU as device, all states in memory"),
    "nvme": Place(
        ("nvme", "nvme", "nvme"), "a CPU as device, all states on nvme, in the least memory where nothing wants more"
    ),
    "device": Place(
        ("nvme", "host", "device"),
        "a (simulated) device with memory of its own, states on all tiers, in as little",
        True,
    ),
}
STAGES = (0, 1, 2, 3)
"""Of several ranks: on one, nothing is sharded."""
_GATHERS_ALWAYS = 3
"""Others gather parameters after an update alone, if the window has room for all."""
WORLD_SIZES = (2, 3)
RANKS_DIFFER = "the ranks do not do the same"
_MODEL_AND_LOOP = (0, 1)
"""Positions in what `_pairs` makes pairs of."""


@dataclass(frozen=True)
class Cell:
    """One of them."""

    model: str
    loop: str
    place: str
    stage: int = 3
    world_size: int = 1

    @property
    def kind(self) -> KindOfModel:
        """The model."""
        return MODELS[self.model]

    @property
    def refused(self) -> str:
        """What the error says, or nothing."""
        loop = LOOPS[self.loop]
        if self.model in loop.refused_with:
            return loop.refused_with[self.model]
        refused = loop.refused if self.moves or not loop.refused_where_away else ""
        if not self.kind.differs_on_ranks or self.world_size == 1 or self.stage == 0:
            return refused
        # Ranks that gather other blocks notice it in the first forward, or in the first after an update.
        if self.stage == _GATHERS_ALWAYS:
            return refused if loop.refused_before_forward else RANKS_DIFFER
        return refused if refused or loop.brings_all else RANKS_DIFFER

    @property
    def is_chosen_long_one(self) -> bool:
        """Whether it is tried with every change although its loop takes long on several ranks."""
        return self.model == LOOP_MODELS[0] and (self.place, self.stage, self.world_size) == ("device", 3, 2)

    @property
    def moves(self) -> bool:
        """Whether parameters leave the device: to their home, or because other ranks update them."""
        return PLACES[self.place].moves or (self.world_size > 1 and self.stage > 0)

    @property
    def has_least_window(self) -> bool:
        """Whether it is tried in the least memory: on ranks it has room for units whose gradients gather together."""
        wants_more = self.kind.borrows or LOOPS[self.loop].holds_more or self.world_size > 1
        return self.moves and not wants_more

    def __str__(self) -> str:
        on_ranks = f"-{self.stage}-{self.world_size}ranks" if self.world_size > 1 else ""
        return f"{self.model}-{self.loop}-{self.place}{on_ranks}"


def cells(*, exhaustive: bool = EXHAUSTIVE) -> list[Cell]:
    """Those in one process: all of the table, or all models with one loop and some with all."""
    pairs = list(itertools.product(MODELS, LOOPS))
    if not exhaustive:
        pairs = [pair for pair in pairs if _is_chosen(*pair)]
    return [Cell(model, loop, place) for model, loop in pairs for place in PLACES if _can_be(model, loop)]


def rank_cells(*, exhaustive: bool = EXHAUSTIVE) -> list[Cell]:
    """Those on several ranks: all of the table, or few that have each pair of things that can meet.

    Only which model meets which loop is left to chance then: with these pairs they would not be few.
    """
    whole = all_rank_cells()
    if exhaustive:
        return whole
    quick = [cell for cell in whole if not LOOPS[cell.loop].takes_long or cell.is_chosen_long_one]
    return covering(quick, partial(_pairs, apart_from=[_MODEL_AND_LOOP]))


@cache
def all_rank_cells() -> list[Cell]:
    """Of two ranks all; of three those that have each pair."""
    two, three = (
        [
            Cell(model, loop, place, stage, world_size)
            for model, loop in itertools.product(MODELS, LOOPS)
            for place, stage in itertools.product(PLACES, STAGES)
            if _can_be(model, loop)
        ]
        for world_size in WORLD_SIZES
    )
    return two + covering(three, _pairs)


def _pairs(cell: Cell, apart_from: Sequence[tuple[int, int]] = ()) -> Pairs:
    """Each with whether it is refused, so that a pair is not taken for tried where a third thing was refused."""
    values = (cell.model, cell.loop, cell.place, cell.stage, cell.world_size)
    return frozenset((pair, bool(cell.refused)) for pair in pairs_of(values, apart_from=apart_from))


def _is_chosen(model: str, loop: str) -> bool:
    models = LOOP_MODELS[:1] if LOOPS[loop].takes_long else LOOP_MODELS
    return loop == BASE_LOOP or model in models


def _can_be(model: str, loop: str) -> bool:
    """Whether the loop means anything for the model."""
    kind = MODELS[model]
    has = {"": True, "blocks": kind.blocks is not None, "language": kind.is_language_model}
    return has[LOOPS[loop].needs]


def recipe_of(model: str, loop: str) -> Recipe:
    """What is trained."""
    kind = MODELS[model]
    given: dict[str, Any] = {"build": kind.build, "loss": kind.loss, "num_steps": NUM_STEPS}
    return Recipe(**{**given, **LOOPS[loop].changes(kind)})


def plain_recipe(recipe: Recipe, kind: KindOfModel) -> Recipe:
    """The same in plain PyTorch, with the sums of gradients in the same order."""
    if not kind.shares_inputs:
        return recipe

    def prepare(model: nn.Module) -> None:
        recipe.prepare(model)
        add_up_by_block(model)

    return replace(recipe, prepare=prepare)


def train_cell(cell: Cell, recipe: Recipe, folder: Path) -> Outcome:
    """Offloaded."""
    place = PLACES[cell.place]
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), place.homes, strict=True))
    config |= {"stage": cell.stage, "nvme_paths": [folder], "host_memory": _AMPLE, "device_memory": _AMPLE}
    with simulated_devices() if place.is_simulated else nullcontext():
        if cell.has_least_window:
            config["device_memory"] = least_memory(recipe, None, "device_memory", **config)
        return train_offloaded(recipe, **config)


def check_cell(cell: Cell, recipe: Recipe, plain: Outcome | None, folder: Path) -> None:
    """Fail where the table is not right."""
    if cell.refused:
        with pytest.raises(zo.ZeroOffloadError) as refused:
            train_cell(cell, recipe, folder)
        assert cell.refused in str(refused.value)
    else:
        assert plain is not None
        assert differences(plain, train_cell(cell, recipe, folder)) == []
