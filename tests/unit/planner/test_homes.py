"""Homes that a plan finds, against all homes there are."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from support.paper import chain, limits, machine, problem_of, profile_of
from support.thoroughness import EXHAUSTIVE

import zerooffload as zo
from zerooffload.config import TierName, UpdateMode
from zerooffload.planner import placement
from zerooffload.planner.admission import AnnouncedPlan, Limits
from zerooffload.planner.cost import StepKind, speeds_of
from zerooffload.planner.cost.demand import may_go_ahead
from zerooffload.planner.cost.step import floor_seconds
from zerooffload.planner.homes import homes_within
from zerooffload.planner.placement import TierChoices, UnitHomes
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.search.candidates import Wish, candidates

NUM_DRAWS = 200 if EXHAUSTIVE else 24
DEVICE, HOST, NVME = TierName.DEVICE, TierName.HOST, TierName.NVME


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rings alone take more than a tiny model."""
    monkeypatch.setattr(placement, "CHUNK_NUMEL", 4096)


class Draw:
    """A tiny model, settings and budgets, at random."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)  # noqa: S311 - not for security
        self.shares_host = draw.random() < 0.5
        widths = [draw.choice([64, 128, 256]) for _ in range(2)]
        config = zo.OffloadConfig(nvme_paths=["/paper"], atomic_steps=draw.random() < 0.7, units=["0", "1"])
        self.problem = problem_of(chain(widths), config, shares_host=self.shares_host)
        # States take 16 bytes a parameter; some budgets are ample, some hopeless.
        states = 16 * sum(width * width for width in widths)
        device, host, nvme = (int(most * draw.random() * states) for most in (1.2, 2.0, 3.0))
        self.limits = limits(device, host, nvme, shares_host=self.shares_host)

    @property
    def tiers(self) -> list[TierName]:
        return [HOST, NVME] if self.shares_host else [DEVICE, HOST, NVME]

    def found(self) -> AnnouncedPlan:
        return homes_within(self.problem, self.limits, machine(shares_host=self.shares_host), self.tiers)

    def all_that_fit(self) -> Iterator[AnnouncedPlan]:
        names = [layout.name for layout in self.problem.layouts if layout.flats]
        for homes in itertools.product(itertools.product(self.tiers, repeat=3), repeat=len(names)):
            plan = self.problem.fitted(_choices(self.problem, names, homes), self.limits)
            if isinstance(plan, AnnouncedPlan):
                yield plan.with_cache()


def _choices(problem: PlacementProblem, names: Sequence[str], homes: Sequence[tuple[TierName, ...]]) -> TierChoices:
    given = dict(zip(names, homes, strict=True))
    every = {layout.name: given.get(layout.name, (HOST, HOST, HOST)) for layout in problem.layouts}
    return TierChoices(*(UnitHomes({name: of[state] for name, of in every.items()}) for state in range(3)))


def _seconds(problem: PlacementProblem, *, shares_host: bool) -> Callable[[AnnouncedPlan], float]:
    speeds, idle = speeds_of(machine(shares_host=shares_host)), profile_of(problem.layouts)

    def seconds(plan: AnnouncedPlan) -> float:
        ahead = may_go_ahead(plan.placement)
        schedule = UpdateMode.DURING_BACKWARD if ahead else UpdateMode.UNDER_NEXT_FORWARD
        return floor_seconds(plan, idle, speeds, StepKind(schedule=schedule))

    return seconds


def test_what_fits_is_found_and_what_is_refused_has_no_homes() -> None:
    """And most of what is found is the best there is: how often, and how far the others are, is what was measured."""
    ratios = []
    for seed in range(NUM_DRAWS):
        draw = Draw(seed)
        seconds = _seconds(draw.problem, shares_host=draw.shares_host)
        best = min(map(seconds, draw.all_that_fit()), default=None)
        if best is None:
            with pytest.raises(zo.BudgetError):
                draw.found()
        else:
            ratios.append(seconds(draw.found()) / best if best else 1.0)
    assert len(ratios) > NUM_DRAWS / 3
    assert sum(ratio <= 1.1 for ratio in ratios) >= 0.85 * len(ratios)
    assert max(ratios) <= 1.6


def test_no_plan_exceeds_a_budget() -> None:
    for seed in range(NUM_DRAWS):
        draw = Draw(seed)
        try:
            plan = draw.found()
        except zo.BudgetError:
            continue
        assert all(plan.planned_bytes(tier) <= draw.limits.of(tier) for tier in TierName)


def test_the_smallest_change_that_a_refusal_names_is_enough_and_no_byte_less() -> None:
    num_refused = 0
    for seed in range(NUM_DRAWS):
        draw = Draw(seed)
        try:
            draw.found()
        except zo.BudgetError as error:
            match = re.search(r'smallest change: (\w+) = "(\d+)B"', str(error))
            if match is None:
                continue
            num_refused += 1
            draw.limits = _with(draw.limits, match[1], int(match[2]))
            draw.found()
    assert num_refused > NUM_DRAWS / 20


def _with(bounds: Limits, field: str, nbytes: int) -> Limits:
    if field == "device_memory":
        return replace(bounds, device_bytes=nbytes)
    if field == "nvme_space":
        return replace(bounds, nvme_bytes=nbytes)
    device = nbytes if bounds.device_shares_host else bounds.device_bytes
    return replace(bounds, host_bytes=nbytes, device_bytes=device)


def test_a_refusal_names_tier_need_have_holders_and_changes() -> None:
    problem = problem_of(chain([256, 256]), zo.OffloadConfig(units=["0", "1"]), shares_host=True)
    with pytest.raises(zo.BudgetError) as caught:
        homes_within(problem, limits(host=100_000, shares_host=True), machine(shares_host=True), [HOST])
    text = str(caught.value)
    assert "does not fit the host budget: it needs 2097152 bytes (2.00 MiB), the budget is 100000 bytes" in text
    assert re.search(r"optimizer state +1.00 MiB +1048576 bytes\n +parameters", text)
    assert 'smallest change: host_memory = "2097152B" (1997152 bytes more)' in text
    assert "within the budgets as they are: nvme_paths, a folder on a drive" in text


def test_what_the_user_has_decided_stays() -> None:
    config = zo.OffloadConfig(nvme_paths=["/paper"], optimizer="nvme", params={"0": "nvme"}, units=["0", "1"])
    problem = problem_of(chain([256, 256]), config, shares_host=True)
    plan = homes_within(problem, limits(shares_host=True), machine(shares_host=True), [HOST, NVME])
    flats = {unit.name: unit.flats[0] for unit in plan.placement.units if unit.flats}
    assert {name: flat.param.tier for name, flat in flats.items()} == {"0": NVME, "1": HOST}
    assert {flat.optimizer.tier for flat in flats.values() if flat.optimizer} == {NVME}
    assert {flat.gradient.tier for flat in flats.values() if flat.gradient} == {HOST}


def test_with_room_for_all_everything_is_in_the_nearest_tier() -> None:
    config = zo.OffloadConfig(nvme_paths=["/paper"], units=["0", "1"])
    problem = problem_of(chain([256, 256]), config)
    plan = homes_within(problem, limits(), machine(), [DEVICE, HOST, NVME])
    assert {claim.tier for claim in plan.claims} == {DEVICE}


def test_a_search_over_two_hundred_units_looks_at_a_few_plans() -> None:
    """Seconds are the machine's; what they are spent on is not."""
    config = zo.OffloadConfig(nvme_paths=["/paper"], units=[str(number) for number in range(200)])
    problem = problem_of(chain([128] * 200), config)
    states = 16 * 200 * 128 * 128
    looked_at = []

    class Counting(PlacementProblem):
        def fitted(self, choices: TierChoices, bounds: Limits) -> object:  # type: ignore[override]
            looked_at.append(choices)
            return super().fitted(choices, bounds)

    counting = Counting(**vars(problem))
    plan = homes_within(counting, limits(states // 20, states // 2), machine(), [DEVICE, HOST, NVME])
    assert plan.planned_bytes(HOST) > 0.8 * states / 2
    # Those in plain homes, and two for each of four searches: the second has room for what lies beside homes.
    assert len(looked_at) <= 5 + 4 * 2


@pytest.mark.parametrize("host_part", [0.2, 0.5, 1.0])
def test_homes_with_room_for_second_places_are_found_in_all_of_host_and_in_half_of_it(host_part: float) -> None:
    config = zo.OffloadConfig(nvme_paths=["/paper"], units=[str(number) for number in range(40)])
    problem = problem_of(chain([128] * 40), config)
    states = 16 * 40 * 128 * 128
    wish = Wish(
        problem=problem,
        limits=limits(states // 10, int(host_part * states)),
        speeds=speeds_of(machine()),
        kind=StepKind(schedule=UpdateMode.UNDER_NEXT_FORWARD),
        order=[layout.name for layout in problem.layouts],
        tiers=[DEVICE, HOST, NVME],
    )
    with_second_places = [plan for plan in candidates(wish) if _has_second_places(plan) and _mixes_tiers(plan)]
    assert len(with_second_places) == 2


def _has_second_places(plan: AnnouncedPlan) -> bool:
    flats = [flat for unit in plan.placement.units for flat in unit.flats]
    return any(state.num_places == 2 for flat in flats for state in flat.states())


def _mixes_tiers(plan: AnnouncedPlan) -> bool:
    """Not one of the plain ones: units differ."""
    homes = {tuple(state.tier for state in flat.states()) for unit in plan.placement.units for flat in unit.flats}
    return len(homes) > 1


def test_a_refusal_names_smaller_moments_that_fit_only_in_mixed_homes() -> None:
    config = zo.OffloadConfig(units=[str(number) for number in range(40)])
    problem = problem_of(chain([128] * 40), config)
    # Of 16 bytes a parameter, 12 with moments in bf16: they fit device and host together, and neither alone.
    nbytes = 14 * 40 * 128 * 128 // 2
    with pytest.raises(zo.BudgetError, match=r'moments = "bf16" \(changes the numbers\)'):
        homes_within(problem, limits(nbytes, nbytes), machine(), [DEVICE, HOST])
