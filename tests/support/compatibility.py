"""The table of what works with what: its cells, and the page that shows them.

A cell is a training of one kind of model, in one kind of loop, with its states in one place, on one rank, or on two in
one of ZeRO's stages, each with batches of its own. It is equal, bit for bit, to the same training in plain PyTorch with
the reference optimizer, or refused with the error that the page names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.compatible_loops import LOOPS, NUM_STEPS
from support.compatible_models import MODELS, KindOfModel, add_up_by_block
from support.environments import Homes, least_memory, simulated_devices
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
        if self.world_size > 1 and self.stage in self.kind.refused_on_ranks:
            return self.kind.refused_on_ranks[self.stage]
        return loop.refused if self.moves or not loop.refused_where_away else ""

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
        on_ranks = f"-{self.stage}" if self.world_size > 1 else ""
        return f"{self.model}-{self.loop}-{self.place}{on_ranks}"


def cells() -> list[Cell]:
    """All of the table, or with ZEROOFFLOAD_TEST_EXHAUSTIVE all that there could be."""
    pairs = list(itertools.product(MODELS, LOOPS))
    if not EXHAUSTIVE:
        pairs = [pair for pair in pairs if _is_chosen(*pair)]
    return [Cell(model, loop, place) for model, loop in pairs for place in PLACES if _can_be(model, loop)]


def rank_cells(world_size: int) -> list[Cell]:
    """Those on several ranks; unless all is gone through, each loop in some of the stages and places."""
    pairs = [(model, loop) for loop, model in itertools.product(LOOPS, MODELS) if _can_be(model, loop)]
    # A loop that looks at all parameters between steps gathers them in one order, or has an error of its own.
    pairs = [pair for pair in pairs if pair[1] == BASE_LOOP or not MODELS[pair[0]].refused_on_ranks]
    pairs = [pair for pair in pairs if EXHAUSTIVE or _is_chosen(*pair)]
    return [
        Cell(model, loop, place, stage, world_size)
        for number, (model, loop) in enumerate(pairs)
        for place, stage in itertools.product(PLACES, STAGES)
        if EXHAUSTIVE or _is_in_turn(number, loop, place, stage)
    ]


def _is_in_turn(number: int, loop: str, place: str, stage: int) -> bool:
    """Twelve cells in a row are in all stages and places, three in different ones; the base loop is in every stage."""
    places = list(PLACES)
    if loop == BASE_LOOP and not PLACES[place].is_simulated:
        return (number + stage + places.index(place)) % 2 == 0
    return stage == number % len(STAGES) and (loop == BASE_LOOP or place == places[number % len(places)])


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


# --- the page --------------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# What works with what

`=` is a training that has the same bits (losses, gradient norms, parameters, buffers) as the same training in plain
PyTorch with the reference optimizer; a number leads to the error with which it is refused. Each of them is a test, in
`tests/training/test_compatibility.py` or `tests/distributed/test_compatibility.py`, and this page is written from
their cells, by `PYTHONPATH=tests python -P tests/support/compatibility.py`. On several ranks "plain PyTorch" is one
process that computes each rank's gradients and adds them as the ranks do.
"""

_ON_RANKS = """\
On two ranks, each with batches of its own, in each of [ZeRO's stages](stages.md). Every run of the tests goes through a
part of these cells, in which each model and each loop has its turn; exhaustive ones go through all.
"""

_NOTES = """\
## To know

- **Quantized bases.** Frozen parameters of integer dtypes, and tensor subclasses that name the tensors inside them
  (torchao's, by `__tensor_flatten__`), move as the bytes that they are. Buffers stay on the device whole: keep large
  ones as parameters. Optimizer states exist for what is trained when `zo.offload` is called, and for nothing else.
- **Mixed precision.** A model keeps the dtypes that it has, norms and routers in fp32 beside blocks in bf16;
  `OffloadConfig(compute_dtype=...)` is for all floating-point parameters.
- **Gradients of a tensor that several blocks use** (an encoder's states, T5's position bias) are added up block by
  block, and so they are in the plain training that it is compared with; torch adds them in another order.
- **Parameters used outside of their module** are brought in the forward or backward of any module, which keeps them
  from then on while it is in use: the window must have room, and the error says how much. Elsewhere:
  `zo.full_params`.
- **Checkpoints** in both forms, in a block or around it; reentrant ones that share a parameter (a block called twice)
  are refused with the advice to use `use_reentrant=False`.
- **Two graphs at a time** (two forwards, one backward) hold the embeddings of both until both are through: the least
  window has no room for that, and the error says how much it wants.
- **Experts.** Tokens may go anywhere: a block of experts is one unit, and an expert that got no token on any rank has
  no gradient. Where each expert is a unit of its own (`units=[...]`), every rank must call the same ones.
- **Other blocks on other ranks** ("skipped blocks"): parameters are gathered at a block's first call after an update,
  and in stage 3, or where the window has no room for all, at later ones too: every rank must call the same blocks in
  the same order. How often ("nested") matters only where blocks come and go. Stage 0 never gathers parameters.
- **Parallelism of torch's.** Stages of [pipelines](stages.md#pipelines) can be offloaded, and models that
  `parallelize_module` has [cut](stages.md#tensor-parallelism). What `fully_shard` has cut is refused by `zo.offload`.
- **A layer larger than the device budget** is refused by `zo.offload`, with the bytes of each holder and what would
  help.
- **torch.compile.** Compile blocks, or their forwards; our hooks are not traced, so `fullgraph=True` is for the
  forward.
- **Other weights** (resized embeddings, new adapters): take `model.state_dict()`, `zo.close(model)`, change a model
  that has these values, and offload that. A forward with parameters that came or went after `zo.offload` is refused.
- **Alternating with another program**: `zo.release_device` and `zo.reclaim_device`, see [memory](memory.md).
"""


def page() -> str:
    """The page, in Markdown."""
    errors: dict[str, int] = {}
    parts = [
        _INTRODUCTION,
        "## Places\n",
        _table(("place", "states"), ((name, place.what) for name, place in PLACES.items())),
        "## Models\n",
        _table(("model", "", *PLACES), _model_rows(errors)),
        "## Loops\n",
        f"With {', '.join(LOOP_MODELS)}; compiled with the first alone. Exhaustive tests go through all models.\n",
        _table(("loop", *PLACES), _loop_rows(errors)),
        "## On ranks\n",
        _ON_RANKS,
        _table(("model", *_rank_columns()), ((name, *_rank_row(name, BASE_LOOP, errors)) for name in MODELS)),
        _table(("loop", *_rank_columns()), ((name, *_rank_row(LOOP_MODELS[0], name, errors)) for name in LOOPS)),
        "## Errors\n",
        "\n".join(f'{number}. "{text}"' for text, number in errors.items()) + "\n",
        _NOTES,
    ]
    return "\n".join(parts)


def _model_rows(errors: dict[str, int]) -> Iterator[tuple[str, ...]]:
    for name, kind in MODELS.items():
        yield (name, kind.what, *(_sign(Cell(name, BASE_LOOP, place).refused, errors) for place in PLACES))


def _rank_columns() -> tuple[str, ...]:
    return tuple(f"{stage}, {place}" for stage, place in itertools.product(STAGES, PLACES))


def _rank_row(model: str, loop: str, errors: dict[str, int]) -> Iterator[str]:
    for stage, place in itertools.product(STAGES, PLACES):
        yield _sign(Cell(model, loop, place, stage, world_size=2).refused, errors)


def _loop_rows(errors: dict[str, int]) -> Iterator[tuple[str, ...]]:
    for name in LOOPS:
        yield (name, *(_sign(Cell(LOOP_MODELS[0], name, place).refused, errors) for place in PLACES))


def _sign(refused: str, errors: dict[str, int]) -> str:
    return f"refused ({errors.setdefault(refused, len(errors) + 1)})" if refused else "="


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGE = Path(__file__).parents[2] / "zerooffload" / "docs" / "compatibility.md"

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
