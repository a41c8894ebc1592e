"""Every model and loop that people have, equal to plain PyTorch or refused: the cells of docs/compatibility.md."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest
import torch
from support.compatibility import BASE_LOOP, PLACES, Cell, cells, check_cell, plain_recipe, recipe_of
from support.compatible_models import MODELS
from support.reference_training import Outcome, Recipe, train_plain
from support.small_models import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

pytestmark = [
    pytest.mark.usefixtures("small_chunks"),
    # Of torch.compile, and of hooks on modules whose inputs have no gradients, in plain PyTorch as well.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.fixture(autouse=True)
def _own_compilations() -> Iterator[None]:
    """What was compiled for another cell counts in limits of torch's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@cache
def recipes(model: str, loop: str) -> Recipe:
    return recipe_of(model, loop)


@cache
def in_plain_pytorch(model: str, loop: str) -> Outcome:
    return train_plain(plain_recipe(recipes(model, loop), MODELS[model]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_blocks_compiled_by_inductor(nvme: Path) -> None:
    recipe = replace(recipes("packed experts", BASE_LOOP), prepare=compile_first_block, num_steps=2)
    check_cell(Cell("packed experts", BASE_LOOP, "nvme"), recipe, train_plain(recipe), nvme)


def compile_first_block(model: nn.Module) -> None:
    """With the default backend."""
    model.get_submodule("blocks")[0].router.compile()
    model.get_submodule("head").compile()


@pytest.mark.parametrize("place", PLACES)
def test_a_model_with_resized_embeddings_goes_on(place: str, nvme: Path) -> None:
    """Its weights taken before it was closed, other ones made of them, and offloaded anew."""
    recipe, cell = recipes("Llama", BASE_LOOP), Cell("Llama", BASE_LOOP, place)
    taken: dict[str, torch.Tensor] = {}

    def take(model: nn.Module, _step: int) -> list[float]:
        taken.update(model.state_dict())
        return []

    before = in_plain_pytorch("Llama", BASE_LOOP)
    check_cell(cell, replace(recipe, between=take), before, nvme)
    plain = train_plain(replace(recipe, build=partial(resized, before.params)))
    check_cell(cell, replace(recipe, build=partial(resized, taken)), plain, nvme)


def resized(state: dict[str, torch.Tensor]) -> nn.Module:
    """The small Llama with these values, and embeddings of two more tokens."""
    model = MODELS["Llama"].build()
    model.load_state_dict(state, strict=False)
    torch.manual_seed(3)
    model.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
    return model


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_cell(cell: Cell, nvme: Path) -> None:
    plain = None if cell.refused else in_plain_pytorch(cell.model, cell.loop)
    check_cell(cell, recipes(cell.model, cell.loop), plain, nvme)
