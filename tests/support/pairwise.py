"""Few cases of many in which all pairs of values occur."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from support.thoroughness import EXHAUSTIVE

Case = TypeVar("Case")
Pairs = frozenset[Hashable]


def pairs_of(values: Iterable[Hashable], *, apart_from: Iterable[tuple[int, int]] = ()) -> Pairs:
    """Each two of the values with their positions, apart from those at some positions."""
    left_out = set(apart_from)
    both = itertools.combinations(enumerate(values), 2)
    return frozenset(pair for pair in both if (pair[0][0], pair[1][0]) not in left_out)


def covering(cases: Sequence[Case], pairs: Callable[[Case], Pairs]) -> list[Case]:
    """Few of `cases` that have every pair that any of them has, in their order; the same ones each time.

    Greedy: first those that bring the most pairs which no other has brought. Which of equals comes first is drawn by
    lot, or the first values would be in most of them.
    """
    remaining = [(number, pairs(case)) for number, case in enumerate(cases)]
    random.Random(0).shuffle(remaining)  # noqa: S311 - the same ones every time
    missing = set().union(*(of_case for _, of_case in remaining))
    chosen = []
    for at_least in range(max((len(of_case) for _, of_case in remaining), default=0), 0, -1):
        for number, of_case in remaining:
            if len(of_case & missing) >= at_least:
                chosen.append(number)
                missing -= of_case
    return [cases[number] for number in sorted(chosen)]


def all_or_covering(*axes: Iterable[Hashable]) -> list[tuple[Any, ...]]:
    """All of a product with ZEROOFFLOAD_TEST_EXHAUSTIVE=1, else few of it that have each pair of values."""
    whole = list(itertools.product(*axes))
    return whole if EXHAUSTIVE else covering(whole, pairs_of)
