"""Kinds of models and loops on two ranks in each stage: equal to the ranks' sums in one process, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from support.compatibility import PLACES, Cell, rank_cells
from support.rank_compatibility import as_values, emulate, train_cells
from support.ranks import run_ranks
from support.reference_training import Outcome, differences
from support.thoroughness import EXHAUSTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping

WORLD_SIZE = 2
CELLS = rank_cells(WORLD_SIZE)
_LIMIT_SECONDS = 7200 if EXHAUSTIVE else 240

pytestmark = [
    # All ranks run in the first test of a place.
    pytest.mark.timeout(_LIMIT_SECONDS),
    # Of torch.compile, and of hooks on modules whose inputs have no gradients, in plain PyTorch as well.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

Results = dict[Cell, tuple["Mapping[str, Any]", ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("ranks"))


@cache
def results(place: str, folder: str) -> Results:
    """Of each rank; all cells of a place in one pair of processes, which is quick."""
    chosen = [cell for cell in CELLS if cell.place == place]
    of_ranks = run_ranks(train_cells, WORLD_SIZE, folder, chosen, limit_seconds=_LIMIT_SECONDS)
    return dict(zip(chosen, zip(*of_ranks, strict=True), strict=True))


@cache
def in_one_process(model: str, loop: str) -> Outcome:
    return Outcome(**as_values(emulate(model, loop, WORLD_SIZE)))


@pytest.mark.parametrize("cell", sorted(CELLS, key=lambda cell: list(PLACES).index(cell.place)), ids=str)
def test_cell(cell: Cell, folder: str) -> None:
    for rank, result in enumerate(results(cell.place, folder)[cell]):
        if cell.refused:
            assert cell.refused in result["refused"]
            continue
        assert result.get("refused") is None
        plain, got = in_one_process(cell.model, cell.loop), Outcome(**result)
        expected = replace(plain, losses=plain.losses[rank::WORLD_SIZE])
        if rank < WORLD_SIZE - 1:
            # What is emulated besides is the last rank's.
            expected = replace(expected, found=got.found, buffers=got.buffers)
        assert differences(expected, got) == []
