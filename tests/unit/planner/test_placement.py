from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from zerooffload import ConfigError
from zerooffload.accelerator import host_buffer_nbytes
from zerooffload.config import Stage, TierName
from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.cost.demand import unit_demands
from zerooffload.planner.placement import (
    CHUNK_NUMEL,
    NUM_GRADIENT_SLOTS,
    NUM_STAGING_SLOTS,
    Claim,
    Durability,
    Placement,
    Placer,
    Reach,
    TierChoices,
    UnitLayout,
    home_tier,
    with_second_places,
    with_sharers,
)
from zerooffload.planner.stages import sharding_of
from zerooffload.sharding.layout import ParamSpec, lay_out

TIERS = ["device", "host", "nvme"]
Placed = Callable[..., Placement]


def sums(claims: Iterable[Claim]) -> dict[tuple[str, str], int]:
    return {(claim.tier.value, claim.holder): claim.nbytes for claim in claims}


def pages(*lengths: int) -> int:
    return sum(-(-length // 4096) * 4096 for length in lengths)


@pytest.mark.parametrize(
    ("choice", "unit", "tier"),
    [
        ("auto", "layers.0", "host"),
        ("nvme", "layers.0", "nvme"),
        ({"layers.*": "nvme", "*": "device"}, "layers.0", "nvme"),
        ({"*": "device", "layers.*": "nvme"}, "layers.0", "device"),
        ({"layers.[12]": "nvme"}, "layers.0", "host"),
        ({"layers.*": "auto"}, "layers.0", "host"),
        ({"(root)": "device"}, "(root)", "device"),
    ],
)
def test_the_first_pattern_that_matches_names_the_home(choice: object, unit: str, tier: str) -> None:
    assert home_tier(choice, unit) == TierName(tier)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", list(product(TIERS, repeat=3)), ids="-".join)
@pytest.mark.parametrize("shares", [True, False])
def test_what_moves_collects_and_stages_follows_from_who_can_address_what(
    placed: Placed,
    cpu: Reach,
    gpu: Reach,
    tiers: tuple[str, str, str],
    shares: bool,  # noqa: FBT001
) -> None:
    params, optimizer, gradients = tiers
    placement = placed(cpu if shares else gpu, params=params, optimizer=optimizer, gradients=gradients)
    device_sees = {"device", "host"} if shares else {"device"}
    host_sees = {"device", "host"} if shares else {"host"}
    flats = [flat for unit in placement.units for flat in unit.flats]
    assert all(flat.moves == (params not in device_sees) for flat in flats)
    assert all(flat.collects == (flat.layout.trainable and gradients not in device_sees) for flat in flats)
    assert all((flat.optimizer is None) == (not flat.layout.trainable) for flat in flats)
    assert bool(placement.window.most_nbytes) == (params not in device_sees)
    assert bool(placement.collection.most_nbytes) == (gradients not in device_sees)
    stages = any(tier not in host_sees for tier in tiers) and set(tiers) != {"device"}
    frozen_stages = params not in host_sees
    assert bool(placement.slot_nbytes) == (stages or frozen_stages)


def test_on_a_cpu_with_everything_at_host_only_homes_are_leased(placed: Placed, cpu: Reach) -> None:
    moments = 2 * 4
    assert sums(placed(cpu).fixed_claims()) == {
        ("host", "parameters"): pages(4 * 10_000, 4 * 5_008, 4 * 5_008, 4 * 3_008, 4 * 112),
        ("host", "optimizer state"): pages(moments * 10_000, moments * 5_008, moments * 5_008, moments * 112),
        ("host", "gradients"): pages(4 * 10_000, 4 * 5_008, 4 * 5_008, 4 * 112),
    }


def test_with_everything_on_nvme_rings_are_leased_at_host(placed: Placed, cpu: Reach) -> None:
    placement = placed(cpu, params="nvme", optimizer="nvme", gradients="nvme")
    # The embedding's only chunk is the largest.
    assert placement.slot_nbytes == pages(40_000, 80_000, 40_000)
    assert placement.gradient_slot_nbytes == pages(40_000)
    claims = sums(placement.fixed_claims())
    assert claims["host", "staging ring"] == NUM_STAGING_SLOTS * placement.slot_nbytes
    assert claims["host", "gradient staging"] == NUM_GRADIENT_SLOTS * placement.gradient_slot_nbytes
    assert {holder for tier, holder in claims if tier == "host"} == {"staging ring", "gradient staging", "journal"}


def test_what_is_trained_has_two_slots_where_steps_are_committed(placed: Placed, cpu: Reach) -> None:
    placement = placed(cpu, params="nvme", optimizer="nvme", gradients="nvme")
    assert placement.commits_steps
    claims = sums(placement.fixed_claims())
    trained, frozen = pages(40_000, 4 * 5_008, 4 * 5_008, 4 * 112), pages(4 * 3_008)
    assert claims["nvme", "parameters"] == 2 * trained + frozen
    assert claims["nvme", "optimizer state"] == 2 * pages(80_000, 8 * 5_008, 8 * 5_008, 8 * 112)
    assert claims["nvme", "gradients"] == trained
    assert claims["nvme", "journal"] == 2 * claims["host", "journal"]
    # Four flats that are trained, with two states each, and one that is frozen: a chunk each.
    assert placement.num_kept_chunks == 9


@pytest.mark.parametrize("homes", [{"params": "nvme"}, {"optimizer": "nvme"}, {"params": {"embed": "nvme"}}])
def test_a_placement_with_trained_states_in_memory_commits_only_if_it_is_durable(
    placed: Placed, cpu: Reach, homes: dict[str, Any]
) -> None:
    placement = placed(cpu, **homes)
    assert not placement.commits_steps
    assert {holder for _, holder in sums(placement.fixed_claims())} & {"journal"} == set()
    durable = placed(cpu, durability=Durability(durable=True), **homes)
    assert durable.commits_steps
    claims = sums(durable.fixed_claims())
    kept = [claims.get(("nvme", holder), 0) for holder in ("parameters", "copies of parameters")]
    assert sum(kept) >= 2 * pages(40_000, 4 * 5_008, 4 * 5_008, 4 * 112)


def test_without_atomic_steps_there_is_one_slot(placed: Placed, cpu: Reach) -> None:
    homes = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    placement = placed(cpu, durability=Durability(atomic_steps=False), **homes)
    assert not placement.commits_steps
    claims = sums(placement.fixed_claims())
    assert claims["nvme", "parameters"] == pages(40_000, 4 * 5_008, 4 * 5_008, 4 * 3_008, 4 * 112)


def test_a_window_holds_the_root_and_the_largest_other_at_least_and_all_at_most(placed: Placed, cpu: Reach) -> None:
    window = placed(cpu, params="nvme").window
    root, embed = pages(400), pages(40_000)
    layers = [pages(4 * 5_008), pages(4 * 5_008) + pages(4 * 3_008)]
    assert window.least_nbytes == root + embed
    assert window.most_nbytes == root + embed + sum(layers)


def test_a_window_holds_units_that_are_nested(cpu: Reach) -> None:
    def unit(name: str, numel: int) -> UnitLayout:
        layout = lay_out(name, [ParamSpec(f"{name}.weight", (numel,))], dtype=torch.float32, trainable=True)
        return UnitLayout(name, (layout,), (name,))

    nested = [unit("layers.0", 1024), unit("layers.0.mlp", 2048), unit("(root)", 1024)]
    window = Placer(nested, cpu, OptimizerStates()).place(TierChoices("nvme", "auto", "auto")).window
    assert window.least_nbytes == 4 * (1024 + 2048 + 1024)


def test_units_may_have_homes_of_their_own(placed: Placed, cpu: Reach) -> None:
    placement = placed(cpu, params={"layers.*": "nvme"}, optimizer={"embed": "nvme"}, gradients={"(root)": "nvme"})
    by_unit = {unit.name: unit.flats[0] for unit in placement.units if unit.flats}
    assert [name for name, flat in by_unit.items() if flat.moves] == ["layers.0", "layers.1"]
    assert [name for name, flat in by_unit.items() if flat.collects] == ["(root)"]
    trained = {name: flat.optimizer for name, flat in by_unit.items() if flat.optimizer is not None}
    assert [name for name, state in trained.items() if state.tier is TierName.NVME] == ["embed"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tier", "held_on_host"), [("nvme", 4), ("host", 0)])
def test_gradients_that_add_up_are_held_in_fp32_and_arrive_in_their_own_dtype(
    gpu: Reach, dtype: torch.dtype, tier: str, held_on_host: int
) -> None:
    layout = lay_out("u", [ParamSpec("w", (3 * CHUNK_NUMEL,))], dtype=dtype, trainable=True)
    units = [UnitLayout("(root)", (layout,), ("(root)",))]
    choices = TierChoices("host", "host", tier)  # type: ignore[arg-type]
    alone, added = (
        Placer(units, gpu, OptimizerStates(), accumulates=several).place(choices) for several in (False, True)
    )
    claims = [sums(placement.fixed_claims()) for placement in (alone, added)]
    assert [of_one[tier, "gradients"] for of_one in claims] == [2 * layout.numel, 4 * layout.numel]
    assert alone.gradient_slot_nbytes == (2 + held_on_host // 2) * CHUNK_NUMEL
    assert added.gradient_slot_nbytes == (2 + held_on_host) * CHUNK_NUMEL
    assert added.collection == alone.collection
    assert added.slot_nbytes - alone.slot_nbytes == (2 * CHUNK_NUMEL if tier == "nvme" else 0)


def test_gradients_of_fp32_that_add_up_take_what_they_take_alone(placed: Placed, gpu: Reach) -> None:
    homes = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    assert placed(gpu, accumulates=True, **homes) == placed(gpu, **homes)


def test_a_chunk_is_no_longer_than_the_longest_shard_and_bounded(cpu: Reach) -> None:
    def placement(numel: int) -> Placement:
        layout = lay_out("u", [ParamSpec("w", (numel,))], dtype=torch.bfloat16, trainable=True)
        placer = Placer([UnitLayout("(root)", (layout,), ("(root)",))], cpu, OptimizerStates())
        return placer.place(TierChoices("nvme", "nvme", "nvme"))

    assert placement(10).units[0].flats[0].param.layout.chunk_numel == 4096
    assert placement(3 * CHUNK_NUMEL).units[0].flats[0].param.layout.chunk_numel == CHUNK_NUMEL
    assert placement(3 * CHUNK_NUMEL).slot_nbytes == (2 + 2 + 4 + 4 + 2) * CHUNK_NUMEL


def test_the_host_needs_no_copy_of_what_the_device_rounds(placed: Placed, gpu: Reach) -> None:
    claims = sums(placed(gpu, params="device").fixed_claims())
    assert claims["device", "parameters"] == sum(-(-4 * n // 512) * 512 for n in (10_000, 5_008, 5_008, 3_008, 112))


def test_parameters_that_cannot_be_trained_are_refused(cpu: Reach) -> None:
    layout = lay_out("u", [ParamSpec("w", (4,))], dtype=torch.float64, trainable=True)
    placer = Placer([UnitLayout("(root)", (layout,), ("(root)",))], cpu, OptimizerStates())
    with pytest.raises(ConfigError, match="float64 cannot be trained"):
        placer.place(TierChoices("auto", "auto", "auto"))


@pytest.mark.parametrize(("stage", "shards"), [(0, (4, 4, 4)), (1, (4, 4, 1)), (2, (4, 1, 1)), (3, (1, 1, 1))])
def test_a_stage_says_how_many_shards_of_each_state_a_rank_holds(
    stage: Stage, shards: tuple[int, int, int], cpu: Reach, gpu: Reach
) -> None:
    trained, frozen = (
        lay_out("x", [ParamSpec("w", (9_000,))], dtype=torch.float32, trainable=trainable, world_size=4)
        for trainable in (True, False)
    )
    units = [UnitLayout("(root)", (trained, frozen), ("(root)",))]
    sharding = sharding_of(stage, rank=2)
    for reach in (cpu, gpu):
        placement = Placer(units, reach, OptimizerStates(), sharding=sharding).place(
            TierChoices("host", "host", "host")
        )
        (unit,) = with_second_places(placement).units
        flat, of_frozen = unit.flats
        held = [state.layout.shards for state in (flat.param, flat.gradient, flat.optimizer) if state is not None]
        assert tuple(map(len, held)) == shards
        assert all(2 in of_state for of_state in held)
        assert len(of_frozen.param.layout.shards) == shards[0]
        # What is whole where the device computes stays there; gradients are reduced first.
        assert flat.moves == (reach is gpu or stage == 3)
        assert flat.collects
        # Updates go ahead only where a rank updates all that it holds.
        assert flat.param.num_places == (2 if reach is gpu and shards[0] == shards[2] else 1)


@pytest.mark.parametrize(("stage", "shared"), [(0, (1, 4)), (1, (4, 4)), (2, (4, 4)), (3, (1, 1))])
def test_ranks_share_what_they_hold_alike(stage: Stage, shared: tuple[int, int], cpu: Reach, gpu: Reach) -> None:
    """Whole parameters of which each rank updates a part, or none; what that takes is split over the ranks."""
    trained, frozen = (
        lay_out("x", [ParamSpec("w", (9_000,))], dtype=torch.float32, trainable=trainable, world_size=4)
        for trainable in (True, False)
    )
    units = [UnitLayout("(root)", (trained, frozen), ("(root)",))]
    sharding = replace(sharding_of(stage, rank=2), num_sharers=4)
    for reach, home in product((cpu, gpu), TIERS):
        placement = Placer(units, reach, OptimizerStates(), sharding=sharding).place(TierChoices(home, "host", "host"))
        flats = placement.units[0].flats
        expected = shared if (reach, home) == (gpu, "host") else (1, 1)
        assert tuple(flat.param.num_sharers for flat in flats) == expected
        assert all(state.num_sharers == 1 for flat in flats for state in flat.states() if state is not flat.param)
        whole = [host_buffer_nbytes(flat.layout.nbytes) for flat in flats]
        assert placement.shared_nbytes == sum(n for n, many in zip(whole, expected, strict=True) if many > 1)
        if (reach, home) == (gpu, "host"):
            own = sum(pages(flat.param.layout.memory_nbytes // many) for flat, many in zip(flats, shared, strict=True))
            assert sums(placement.home_claims())["host", "parameters"] == own


def test_what_ranks_share_is_not_sent_home_by_each(gpu: Reach) -> None:
    layout = lay_out("x", [ParamSpec("w", (9_000,))], dtype=torch.float32, trainable=True, world_size=4)
    units = [UnitLayout("(root)", (layout,), ("(root)",))]
    first = {}
    for num_sharers in (1, 2, 3, 4):
        sharding = replace(sharding_of(2), num_sharers=num_sharers)
        placement = Placer(units, gpu, OptimizerStates(), sharding=sharding).place(TierChoices("host", "host", "host"))
        first[num_sharers] = unit_demands(placement)["(root)"].first_arrival
    # Of what ranks elsewhere update, each sends its part.
    for num_sharers, part in [(1, 3 / 4), (2, 1 / 4), (3, 1 / 12), (4, 0.0)]:
        assert first[num_sharers] == replace(first[1], copy_out=pytest.approx(layout.nbytes * part))


def test_ranks_that_take_parts_home_count_them(gpu: Reach) -> None:
    """Each in a page of its own, where some but not all have one copy of what is trained."""
    trained, frozen = (
        lay_out("x", [ParamSpec("w", (9_000,))], dtype=torch.float32, trainable=trainable, world_size=4)
        for trainable in (True, False)
    )
    for flat, num_sharers in product((trained, frozen), (1, 2, 4)):
        sharding = replace(sharding_of(1), num_sharers=num_sharers)
        units = [UnitLayout("(root)", (flat,), ("(root)",))]
        placement = Placer(units, gpu, OptimizerStates(), sharding=sharding).place(TierChoices("host", "host", "host"))
        expected = num_sharers if flat.trainable and num_sharers == 2 else 0
        assert placement.num_arrival_counters == expected
        whole = host_buffer_nbytes(flat.nbytes) if num_sharers > 1 else 0
        assert placement.shared_nbytes == whole + expected * host_buffer_nbytes(1)
        leased = sums(placement.fixed_claims()).get(("host", "arrival counters"), 0)
        assert leased == (host_buffer_nbytes(1) if expected else 0)
        # As if they had been found out later.
        apart = Placer(units, gpu, OptimizerStates(), sharding=sharding_of(1)).place(
            TierChoices("host", "host", "host")
        )
        assert with_sharers(apart, num_sharers) == placement
