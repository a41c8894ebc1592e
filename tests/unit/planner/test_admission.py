from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from zerooffload import BudgetError
from zerooffload.config import TierName
from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.admission import AnnouncedPlan, Limits, announce
from zerooffload.planner.placement import Claim, Placement, Placer, Reach, TierChoices, UnitLayout
from zerooffload.tiers.staging import CACHE_HOLDER

PLENTY = 1 << 40
NVME = TierChoices("nvme", "nvme", "nvme")
HOST = TierChoices("host", "host", "host")

Announce = Callable[[TierChoices, Limits], AnnouncedPlan]
FIELDS = {"device_memory": "device_bytes", "host_memory": "host_bytes", "nvme_space": "nvme_bytes"}


def limits(*, device: int = PLENTY, host: int = PLENTY, nvme: int = PLENTY, shares: bool = True) -> Limits:
    return Limits(device, host, nvme, shares)


@pytest.fixture
def announced(units: list[UnitLayout], cpu: Reach, gpu: Reach) -> Announce:
    def call(choices: TierChoices, bounds: Limits) -> AnnouncedPlan:
        def retry(others: TierChoices) -> Placement:
            return Placer(units, cpu if bounds.device_shares_host else gpu, OptimizerStates()).place(others)

        return announce(retry(choices), bounds, choices, retry)

    return call


def least_host_bytes(announced: Announce, choices: TierChoices) -> int:
    """What the refusal says that the host must have."""
    with pytest.raises(BudgetError) as caught:
        announced(choices, limits(host=0))
    match = re.search(r'host_memory = "(\d+)B"', str(caught.value))
    assert match is not None
    return int(match.group(1))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("choices", [NVME, HOST, TierChoices("nvme", "host", "device")])
def test_a_plan_with_plenty_takes_all_that_could_ever_be_used(
    announced: Announce,
    choices: TierChoices,
    shares: bool,  # noqa: FBT001
) -> None:
    plan = announced(choices, limits(shares=shares))
    assert plan.window_nbytes == plan.placement.window.most_nbytes
    assert plan.collection_nbytes <= plan.placement.collection.most_nbytes


def test_planned_bytes_are_the_claims_and_a_shared_device_counts_in_the_host(announced: Announce) -> None:
    shared, own = announced(NVME, limits()), announced(NVME, limits(shares=False))
    for plan in (shared, own):
        by_tier = {tier: sum(c.nbytes for c in plan.claims if c.tier is tier) for tier in TierName}
        assert plan.planned_bytes(TierName.NVME) == by_tier[TierName.NVME]
        assert plan.planned_bytes(TierName.DEVICE) == by_tier[TierName.DEVICE]
        assert by_tier[TierName.DEVICE] == plan.window_nbytes + plan.collection_nbytes
        both = by_tier[TierName.HOST] + (by_tier[TierName.DEVICE] if plan is shared else 0)
        assert plan.planned_bytes(TierName.HOST) == both


@pytest.mark.parametrize("choices", [NVME, HOST, TierChoices("nvme", "nvme", "host")])
def test_the_least_budget_is_accepted_and_one_byte_less_refused(announced: Announce, choices: TierChoices) -> None:
    least = least_host_bytes(announced, choices)
    assert announced(choices, limits(host=least)).planned_bytes(TierName.HOST) == least
    with pytest.raises(BudgetError, match="1 bytes more"):
        announced(choices, limits(host=least - 1))


@pytest.mark.parametrize("extra", [0, 4096, 40_000, 90_000, 1 << 20])
def test_what_a_budget_leaves_over_makes_the_window_larger_and_is_never_exceeded(
    announced: Announce, extra: int
) -> None:
    least = least_host_bytes(announced, NVME)
    plan = announced(NVME, limits(host=least + extra))
    assert plan.planned_bytes(TierName.HOST) <= least + extra
    assert plan.placement.window.least_nbytes <= plan.window_nbytes <= plan.placement.window.most_nbytes
    assert plan.collection_nbytes >= plan.placement.collection.least_nbytes


@pytest.mark.parametrize("extra", [0, 4096, 40_000, 90_000, 1 << 20])
def test_what_is_to_be_spared_is_left_if_the_least_leaves_it(announced: Announce, extra: int) -> None:
    least, spare = least_host_bytes(announced, NVME), 40_000
    plan = announced(NVME, replace(limits(host=least + extra), spare_host_bytes=spare))
    assert plan.leaves_spare == (extra >= spare)
    if extra < spare:
        assert plan.window_nbytes == plan.placement.window.least_nbytes


def test_a_rank_that_shares_with_none_keeps_all_claims(announced: Announce) -> None:
    plain = announced(NVME, limits())
    cache = Claim(TierName.HOST, CACHE_HOLDER, 4096)
    plan = replace(plain, num_cached_slots=1, claims=(*plain.claims, cache))
    alone = plan.with_sharers(1)
    assert sorted(alone.claims, key=repr) == sorted(plan.claims, key=repr)
    assert replace(alone, claims=plan.claims) == plan


def test_a_window_never_exceeds_the_device(announced: Announce) -> None:
    plan = announced(NVME, limits(device=150_000, shares=False))
    assert plan.planned_bytes(TierName.DEVICE) <= 150_000


@pytest.mark.parametrize(
    ("choices", "bounds", "field"),
    [
        (NVME, limits(host=1000), "host_memory"),
        (NVME, limits(host=1000, device=1000), "host_memory"),
        (NVME, limits(device=1000), "device_memory"),
        (NVME, limits(nvme=1000), "nvme_space"),
        (HOST, limits(host=1000), "host_memory"),
        (NVME, limits(device=1000, shares=False), "device_memory"),
        (TierChoices("device", "host", "host"), limits(device=1000, shares=False), "device_memory"),
    ],
)
def test_a_refusal_names_the_budget_its_holders_and_the_smallest_change_which_then_helps(
    announced: Announce, choices: TierChoices, bounds: Limits, field: str
) -> None:
    with pytest.raises(BudgetError) as caught:
        announced(choices, bounds)
    message = str(caught.value)
    match = re.search(r'smallest change: (\w+) = "(\d+)B" \((\d+) bytes more\)', message)
    assert match is not None
    assert match.group(1) == field
    tier = {"device_memory": "device", "host_memory": "host", "nvme_space": "nvme"}[field]
    assert f"does not fit the {tier} budget" in message
    holders = [int(nbytes) for nbytes in re.findall(r"^  .*  (\d+) bytes$", message, re.MULTILINE)]
    assert sum(holders) == int(match.group(2))
    assert holders == sorted(holders, reverse=True)
    assert int(match.group(2)) - int(match.group(3)) == getattr(bounds, FIELDS[field])
    helped = replace(bounds, **{FIELDS[field]: int(match.group(2))})
    if bounds.device_shares_host and field == "host_memory":
        helped = replace(helped, device_bytes=max(helped.device_bytes, int(match.group(2))))
    announced(choices, helped)


def test_a_refusal_lists_homes_that_would_fit_as_it_is_and_each_of_them_does(announced: Announce) -> None:
    bounds = limits(host=least_host_bytes(announced, NVME) + 100_000, nvme=PLENTY)
    with pytest.raises(BudgetError) as caught:
        announced(HOST, limits(host=200_000))
    assert "within the budgets" not in str(caught.value)
    tight = TierChoices("nvme", "host", "nvme")
    bounds = limits(host=least_host_bytes(announced, tight) - 1)
    with pytest.raises(BudgetError) as caught:
        announced(tight, bounds)
    listed = re.findall(r'(params|optimizer|gradients) = "(\w+)"', str(caught.value).split("within the budgets")[-1])
    for state, tier in listed:
        announced(replace(tight, **{state: tier}), bounds)
    every = [(state, tier.value) for state in ("params", "optimizer", "gradients") for tier in TierName]
    for state, tier in set(every) - set(listed):
        if getattr(tight, state) != tier:
            with pytest.raises(BudgetError):
                announced(replace(tight, **{state: tier}), bounds)
