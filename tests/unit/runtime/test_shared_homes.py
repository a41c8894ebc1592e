"""Finding the ranks that can map one memory, where the others say what the test wants."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from zerooffload.accelerator import SharedPages
from zerooffload.runtime.shared_homes import Member, Sharers, meet_in_memory, together
from zerooffload.sharding.collectives import SingleRank


@pytest.mark.parametrize(
    ("reached", "groups"),
    [
        ([[0, 1], [1, 0]], [(0, 1)]),
        ([[0], [1], [2]], [(0,), (1,), (2,)]),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], [(0, 2), (1, 3)]),
        ([[0, 1], [0, 1], [2]], [(0, 1), (2,)]),
        # One that has no memory, and one that cannot map the first's.
        ([[1, 2], [1, 2], [1, 2]], [(0,), (1, 2)]),
        ([[0, 1, 2], [0, 1, 2], [1, 2]], [(0, 1), (2,)]),
    ],
)
def test_ranks_are_together_that_map_the_memory_of_one(reached: list[list[int]], groups: list[tuple[int, ...]]) -> None:
    assert together(reached) == groups


class First(SingleRank):
    """Rank 0 of several: the others' memory is on these machines, and they map what is on theirs; None is this one."""

    def __init__(self, machines: Sequence[str | None]) -> None:
        super().__init__(global_rank=10)
        self.machines = machines
        self.others = [SharedPages.make() for _ in machines]

    def gather_of_shards(self, value: Any) -> list[Any]:
        """What each has, and then what each reaches."""
        if isinstance(value[1], Member):
            addresses = [
                pages.address if machine is None else replace(pages.address, machine=machine)
                for machine, pages in zip(self.machines, self.others, strict=True)
            ]
            return [value, *((address, Member(11 + n, os.getpid())) for n, address in enumerate(addresses))]
        where = [None, *self.machines]
        reached = [[rank for rank, other in enumerate(where) if other == machine] for machine in where]
        assert value[0] == reached[0]
        return [value, *((ranks, "") for ranks in reached[1:])]


def meet(machines: Sequence[str | None], *, wanted: bool = True) -> Sharers:
    return meet_in_memory(First(machines), wanted=wanted)


def test_ranks_of_one_machine_meet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zerooffload"):
        sharers = meet([None, None])
    assert sharers.pages is not None
    assert (sharers.ranks, sharers.position, sharers.num_ranks) == ((0, 1, 2), 0, 3)
    assert [member.global_rank for member in sharers.members] == [10, 11, 12]
    assert caplog.messages == []


def test_ranks_of_several_machines_meet_on_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zerooffload"):
        sharers = meet(["b", None, "b"])
        alone = meet(["b", "b"])
    assert (sharers.ranks, sharers.num_ranks) == ((0, 2), 2)
    assert [member.global_rank for member in sharers.members] == [10, 12]
    # The others meet, in which this one takes part when they wait for each other.
    assert (alone.ranks, alone.num_ranks, alone.pages) == ((0,), 1, None)
    why = "(rank 0 cannot map what rank 1 has: it is on another machine (b))"
    assert caplog.messages == [
        f"ranks that have one copy of parameters on host: 0, 2; 1, 3 {why}",
        f"ranks that have one copy of parameters on host: 0; 1, 2 {why}",
    ]


def test_ranks_that_are_all_alone_say_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zerooffload"):
        assert meet(["b", "c"]) == Sharers()
    (message,) = caplog.messages
    assert message.startswith("each rank keeps its own copy of parameters on host: rank 0 cannot map what rank 1 has")
