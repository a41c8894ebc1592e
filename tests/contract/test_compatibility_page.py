"""The page of what works with what is that of the cells that are tested."""

from __future__ import annotations

import itertools

from support.compatibility import Cell, rank_cells
from support.compatibility_page import PAGE, page
from support.compatible_loops import LOOPS
from support.pairwise import covering, pairs_of


def test_the_page_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "write it again: PYTHONPATH=tests python -P tests/support/compatibility_page.py"


def test_every_run_of_the_tests_has_each_pair_of_what_can_meet_on_ranks() -> None:
    """But models with loops, and compiled blocks but in one cell each; what trains in some cell is trained."""

    def pairs(cells: list[Cell]) -> set[object]:
        return {
            (first, second, bool(cell.refused))
            for cell in cells
            for first in (cell.model, cell.loop, cell.place)
            for second in (cell.place, cell.stage, f"{cell.world_size} ranks")
        }

    whole = rank_cells(exhaustive=True)
    quick = [cell for cell in whole if cell.is_chosen_long_one or not LOOPS[cell.loop].takes_long]
    tried = rank_cells(exhaustive=False)
    assert pairs(tried) == pairs(quick)
    assert set(tried) <= set(quick)
    assert len(tried) < len(whole) / 30


def test_a_cover_has_all_pairs_and_few_cases() -> None:
    cases = list(itertools.product(range(5), "abc", (False, True), "wxyz"))
    chosen = covering(cases, pairs_of)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) < 30  # 20 values of the two longest meet: no fewer would do
    assert chosen == covering(cases, pairs_of)
    assert covering([], pairs_of) == []
