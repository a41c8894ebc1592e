"""Kinds of models and loops on several ranks in each stage: equal to the ranks' sums in one process, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from support.compatibility import BASE_LOOP, Cell, rank_cells
from support.rank_compatibility import as_values, emulate, train_cells
from support.ranks import RanksError, run_ranks
from support.reference_training import Outcome, differences
from support.thoroughness import EXHAUSTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping

CELLS = rank_cells()
_LIMIT_SECONDS = 900 if EXHAUSTIVE else 240

pytestmark = [
    # The ranks run in the first test of a group.
    pytest.mark.timeout(_LIMIT_SECONDS),
    # Of torch.compile, and of hooks on modules whose inputs have no gradients, in plain PyTorch as well.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

Results = dict[Cell, tuple["Mapping[str, Any]", ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("ranks"))


def group(cell: Cell) -> tuple[int, str, str]:
    """Cells that the same processes go through, which is quick; all cells are cut into groups that take minutes."""
    if not EXHAUSTIVE:
        part = ""
    elif cell.world_size > 2:
        part = f"stage {cell.stage}"
    else:
        part = cell.model if cell.loop != BASE_LOOP else ""
    return (cell.world_size, cell.place, part)


@cache
def results(group_of_cells: tuple[int, str, str], folder: str) -> Results | RanksError:
    """Of each rank; an error is not tried again by each test."""
    chosen = [cell for cell in CELLS if group(cell) == group_of_cells]
    world_size, *_ = group_of_cells
    try:
        of_ranks = run_ranks(train_cells, world_size, folder, chosen, limit_seconds=_LIMIT_SECONDS)
    except RanksError as error:
        return error
    return dict(zip(chosen, zip(*of_ranks, strict=True), strict=True))


@cache
def in_one_process(model: str, loop: str, world_size: int) -> Outcome:
    return Outcome(**as_values(emulate(model, loop, world_size)))


@pytest.mark.parametrize("cell", sorted(CELLS, key=group), ids=str)
def test_cell(cell: Cell, folder: str) -> None:
    of_group = results(group(cell), folder)
    if isinstance(of_group, RanksError):
        raise of_group
    for rank, result in enumerate(of_group[cell]):
        if cell.refused:
            assert cell.refused in result["refused"]
            continue
        assert result.get("refused") is None
        plain, got = in_one_process(cell.model, cell.loop, cell.world_size), Outcome(**result)
        expected = replace(plain, losses=plain.losses[rank :: cell.world_size])
        if rank < cell.world_size - 1:
            # What is emulated besides is the last rank's.
            expected = replace(expected, found=got.found, buffers=got.buffers)
        assert differences(expected, got) == []
