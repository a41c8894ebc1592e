"""Parameters that ranks hold whole on host are there once on each machine: the same bits as on each rank's own copy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_machines import live_with_and_without, look_before_all_is_home
from support.rank_sharing import Case, train_in_the_least_window, train_with_and_without
from support.ranks import run_ranks
from support.thoroughness import EXHAUSTIVE, one_in

from zerooffload.accelerator import host_buffer_nbytes, shared_part_nbytes
from zerooffload.telemetry import Wait

TWO_AND_ONE = (0, 0, 1)
IN_TURN = (0, 1, 0, 1)


@pytest.mark.parametrize("stage", [0, 1, 2] if EXHAUSTIVE else [1])
def test_the_memory_of_one_on_each_machine(stage: int, tmp_path: Path) -> None:
    ranks = run_ranks(partial(train_with_and_without, machines=TWO_AND_ONE), 3, str(tmp_path), stage)
    for rank, (shared, own) in enumerate(ranks):
        assert shared["losses"] == own["losses"]
        for name, value in own["params"].items():
            assert torch.equal(shared["params"][name], value), name
        whole = sum(host_buffer_nbytes(nbytes) for nbytes in shared["whole"]) if rank < 2 else 0
        assert shared["resident"] == whole
        parts = sum(shared_part_nbytes(nbytes, 2) for nbytes in shared["whole"]) if rank < 2 else 0
        # And a page to count in, where parts of what is trained come from elsewhere.
        counter = host_buffer_nbytes(1) if rank < 2 and stage > 0 else 0
        assert own["leased"]["host"] - shared["leased"]["host"] == whole - parts - counter
    whole, together = ranks[0][0]["resident"], sum(shared["own_part"] for shared, _ in ranks)
    assert whole - 2 * 1024 <= together <= whole


CASES = [
    Case(2, "during_backward", machines=TWO_AND_ONE, fields={"compute_dtype": "bf16", "accumulation_steps": 2}),
    Case(1, "under_next_forward", machines=TWO_AND_ONE),
    Case(2, "after_backward", machines=TWO_AND_ONE, optimizer="nvme"),
    Case(1, "during_backward", machines=(0, 1, 0)),
    Case(2, "under_next_forward", machines=(0, 1, 1), fields={"durable": True}),
]
CASES_OF_FOUR = [
    Case(2, "under_next_forward", machines=IN_TURN),
    Case(1, "after_backward", machines=(0, 0, 1, 1)),
    Case(2, "during_backward", machines=(0, 0, 0, 1)),
    Case(1, "during_backward", machines=(0, 0, 1, 1), fields={"durable": True}),
    Case(2, "under_next_forward", machines=(0, 0, 1, 2)),
]


@pytest.mark.parametrize("cases", [CASES_OF_FOUR[:: one_in(5)], *([CASES] if EXHAUSTIVE else [])])
def test_the_same_bits_while_units_come_and_go(cases: list[Case], tmp_path: Path) -> None:
    world_size = len(cases[0].machines)
    assert run_ranks(train_in_the_least_window, world_size, str(tmp_path), cases) == [[]] * world_size


FIELDS: list[dict[str, Any]] = [
    {"stage": 2, "update": "under_next_forward"},
    {"stage": 1, "update": "during_backward", "compute_dtype": "bf16"},
    {"stage": 2, "update": "after_backward"},
]


@pytest.mark.parametrize("machines", [TWO_AND_ONE, IN_TURN] if EXHAUSTIVE else [TWO_AND_ONE], ids=str)
def test_all_that_a_run_may_do(machines: tuple[int, ...], tmp_path: Path) -> None:
    found = run_ranks(live_with_and_without, len(machines), str(tmp_path), machines, FIELDS[:: one_in(3)])
    assert found == [[]] * len(machines)


WAITS = [("fetch._begin", Wait.PARAMETER_WRITE), ("arrivals._work", Wait.PARAMETER_WRITE)]
"""Of who reads what another rank takes home, and of who says that it is there."""


def test_nobody_reads_what_is_not_home(tmp_path: Path) -> None:
    """Rank 1 brings a block in again, while rank 0, which is to take a part of it home, is busy elsewhere."""
    ranks = run_ranks(look_before_all_is_home, 3, str(tmp_path), WAITS)
    (own, _), (shared, _), *without = ranks[1]
    assert shared == own
    for number, (seen, _) in enumerate(without):
        assert seen != own
        assert any(looks[2 + number][1] for looks in ranks)
