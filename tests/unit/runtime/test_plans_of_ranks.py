"""Homes that ranks find for themselves, where some have one host copy of parameters and others their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from support.paper import chain, limits, problem_of

import zerooffload as zo
from zerooffload.accelerator import shared_part_nbytes
from zerooffload.config import TierName
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.placement import TierChoices
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.stages import sharding_of
from zerooffload.runtime.planning import plan_together
from zerooffload.sharding.collectives import SingleRank

T = TypeVar("T")
NUM_SHARERS = (2, 2, 1)


class Rank(SingleRank):
    """One of several, whose limits are the same and of which some have one copy."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = len(NUM_SHARERS)

    def gather_objects(self, value: T) -> list[T]:
        """As the others would say it."""
        if isinstance(value, tuple) and value[-1] == NUM_SHARERS[self.rank]:
            return [(*value[:-1], num_sharers) for num_sharers in NUM_SHARERS]  # type: ignore[misc]
        return [value] * self.world_size


def problem_on(rank: int, config: zo.OffloadConfig) -> PlacementProblem:
    sharding = replace(sharding_of(config.stage, rank), num_sharers=NUM_SHARERS[rank])
    return problem_of(chain([128] * 100), config, sharding=sharding, world_size=len(NUM_SHARERS))


def params_of(plan: AnnouncedPlan) -> list[tuple[TierName, int]]:
    """Where parameters are, and how many ranks have one copy."""
    flats = (flat for unit in plan.placement.units for flat in unit.flats)
    return [(flat.param.tier, flat.param.num_sharers) for flat in flats]


def test_all_ranks_find_the_homes_of_the_one_with_most_to_hold() -> None:
    """There is room on host for all parameters of the ranks that have one copy, and not for those of the other."""
    config = zo.OffloadConfig(stage=2, optimizer="host", gradients="host", nvme_paths=["/paper"], atomic_steps=False)
    on_host = TierChoices("host", "host", "host")
    needs = [problem_on(rank, config).announced(on_host, limits()).planned_bytes(TierName.HOST) for rank in range(3)]
    assert needs[0] < needs[2]
    bounds = limits(host=(needs[0] + needs[2]) // 2)
    plans = [plan_together(problem_on(rank, config), bounds, Rank(rank)) for rank in range(3)]
    tiers = [[tier for tier, _ in params_of(plan)] for plan in plans]
    assert tiers[0] == tiers[1] == tiers[2]
    assert {TierName.HOST, TierName.NVME} == set(tiers[0])
    for plan, num_sharers in zip(plans, NUM_SHARERS, strict=True):
        shared = [many for tier, many in params_of(plan) if tier is TierName.HOST]
        assert shared == [num_sharers] * len(shared)
        flats = [flat for unit in plan.placement.units for flat in unit.flats if flat.param.tier is TierName.HOST]
        claimed = {claim.holder: claim.nbytes for claim in plan.claims if claim.tier is TierName.HOST}
        assert claimed["parameters"] == sum(shared_part_nbytes(flat.layout.nbytes, num_sharers) for flat in flats)
        assert (plan.window_nbytes, plan.collection_nbytes) == (plans[0].window_nbytes, plans[0].collection_nbytes)
