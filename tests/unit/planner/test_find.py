"""Plans: what "auto" leaves open is filled in by what is quickest within a machine's memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
from support.paper import chain, machine, problem_of, profile_of

import zerooffload as zo
from zerooffload.config import TierName, UpdateMode
from zerooffload.planner.find import Request, find_plan
from zerooffload.planner.plan import Plan
from zerooffload.planner.profiles import MachineProfile, ModelProfile

MIB = 1 << 20
NUM_LAYERS = 12
STATES = 16 * NUM_LAYERS * 2048 * 2048
"""Bytes of all states in fp32: 768 MiB."""
UNITS = [str(number) for number in range(NUM_LAYERS)]
MODEL = chain([2048] * NUM_LAYERS)


def of_memory(device: int, host: int, *, drives: int = 1) -> MachineProfile:
    paper = machine()
    return paper.model_copy(
        update={
            "device": paper.device.model_copy(update={"memory": device}),
            "host": paper.host.model_copy(update={"memory": host}),
            "drives": paper.drives * drives,
        }
    )


def profiled(saved_nbytes: int, input_nbytes: int, num_samples: int) -> ModelProfile:
    """Each layer saves so much for a sample, or keeps so much as its input; a sample computes for 1 ms."""
    profile = profile_of(
        problem_of(MODEL, zo.OffloadConfig(units=UNITS)).layouts,
        forward=1e-3 * num_samples,
        backward=2e-3 * num_samples,
    )
    saved = saved_nbytes * num_samples
    units = [
        replace(
            work,
            input_nbytes=input_nbytes * num_samples,
            saved_nbytes=saved,
            forward_peak_nbytes=saved,
            backward_peak_nbytes=saved,
        )
        if work.forward.flops["fp32"]
        else work
        for work in profile.units
    ]
    return replace(profile, batch_size=num_samples, units=tuple(units))


def planned(
    paper: MachineProfile, *, batch_size: int = 4, saved: int = 0, inputs: int | None = None, **settings: Any
) -> Plan:
    allowed = settings.pop("may_use_moments", ())
    return find_plan(
        Request(
            config=zo.OffloadConfig(units=UNITS, **settings),
            machine=paper,
            batch_size=batch_size,
            profile_of=partial(profiled, saved, saved // 100 if inputs is None else inputs),
            problem_of=partial(problem_of, MODEL),
            may_use_moments=allowed,
        )
    )


def tiers_of(plan: Plan) -> set[TierName]:
    return {tier for of in plan.homes.values() for tier in (of.params, of.optimizer, of.gradients)}


def test_a_device_that_holds_all_holds_all() -> None:
    plan = planned(of_memory(2 * STATES, STATES))
    assert tiers_of(plan) == {TierName.DEVICE}
    assert {name: plan.settings[name] for name in ("params", "optimizer", "gradients")} == dict.fromkeys(
        ("params", "optimizer", "gradients"), "device"
    )
    assert plan.reasons == ()


def test_what_the_device_has_left_beside_activations_is_used() -> None:
    plan = planned(of_memory(STATES // 2, 4 * STATES), saved=MIB)
    device = plan.estimate.memory[0]
    assert device.leased_bytes > 0.8 * (STATES // 2 - 4 * NUM_LAYERS * MIB)
    assert device.peak_bytes <= STATES // 2
    assert plan.settings["device_memory"] == plan.announced.limits.device_bytes < STATES // 2
    assert any("optimizer on host: device_memory is" in reason for reason in plan.reasons)


def test_what_neither_holds_goes_to_the_drive_and_the_plan_says_what_that_costs() -> None:
    plan = planned(of_memory(STATES // 8, STATES))
    assert TierName.NVME in tiers_of(plan)
    assert plan.settings["nvme_paths"] == ("/paper",)
    assert any("on nvme: host_memory is" in reason and "a step" in reason for reason in plan.reasons)


def test_the_settings_of_a_plan_are_those_of_the_run_that_was_planned() -> None:
    plan = planned(of_memory(STATES // 8, STATES))
    config = zo.OffloadConfig(units=UNITS, **plan.settings)
    again = find_plan(
        Request(
            config=config,
            machine=plan.machine,
            batch_size=4,
            profile_of=partial(profiled, 0, 0),
            problem_of=partial(problem_of, MODEL),
        )
    )
    assert again.homes == plan.homes
    assert again.announced.claims == plan.announced.claims
    assert again.estimate.seconds == plan.estimate.seconds


def test_without_a_drive_what_does_not_fit_is_refused_with_what_would_help() -> None:
    with pytest.raises(zo.BudgetError, match=r"smallest change: (.|\n)*nvme_paths, a folder on a drive"):
        planned(of_memory(STATES // 8, STATES // 2, drives=0))


def test_activations_that_do_not_fit_are_computed_again() -> None:
    # 12 layers of 4 samples save 48 x 8 MiB; their inputs are a hundredth of that.
    plan = planned(of_memory(256 * MIB, 4 * STATES), saved=8 * MIB)
    assert plan.settings["activations"] == "host"
    assert plan.kind.computed_again == frozenset(UNITS)
    assert plan.estimate.memory[0].peak_bytes <= 256 * MIB


def test_a_batch_too_large_even_so_is_refused_before_anything_is_placed() -> None:
    with pytest.raises(zo.BudgetError, match=r"activations alone need \d+ bytes.*micro_batch_size"):
        planned(of_memory(16 * MIB, 4 * STATES), saved=8 * MIB, activations="keep")


def test_a_slice_size_is_found_that_leaves_activations_room() -> None:
    plan = planned(of_memory(128 * MIB, 4 * STATES), saved=8 * MIB, micro_batch_size="auto")
    size = plan.settings["micro_batch_size"]
    assert size in {1, 2}
    assert plan.kind.num_slices == 4 // size
    assert plan.estimate.memory[0].peak_bytes <= 128 * MIB


def test_blocks_that_keep_their_activations_keep_those_of_the_whole_batch() -> None:
    paper = of_memory(2 * STATES, STATES)
    of_none, of_slices = (
        planned(paper, saved=2 * MIB, activations="keep", micro_batch_size=size).estimate.memory[0]
        for size in (None, 1)
    )
    assert of_slices.activations == of_none.activations
    assert max(of_none.activations.values()) == 4 * NUM_LAYERS * 2 * MIB
    some = planned(paper, saved=2 * MIB, activations={"3": "keep", "*": "device"}, micro_batch_size=1)
    # Beside what one layer keeps for four samples, the slice of the layer that is computed again in backward.
    assert some.estimate.memory[0].activations["backward"] == (4 + 1) * 2 * MIB


@pytest.mark.parametrize(
    ("device", "host"), [(128 * MIB, STATES), (192 * MIB, STATES), (256 * MIB, STATES), (256 * MIB, STATES // 2)]
)
def test_how_activations_are_kept_and_sliced_is_as_quick_as_the_best_of_all_ways(device: int, host: int) -> None:
    """But for a twentieth, which the search does not look for."""
    paper = of_memory(device, host)
    ways = []
    for activations, size in product(("auto", "host", "nvme"), (None, 2, 1)):
        with suppress(zo.BudgetError):
            settings = {"activations": activations, "micro_batch_size": size, "nvme_paths": ["/paper"]}
            ways.append(planned(paper, saved=8 * MIB, inputs=MIB, **settings).estimate.seconds)
    chosen = planned(paper, saved=8 * MIB, inputs=MIB, micro_batch_size="auto")
    assert max(ways) > 1.05 * min(ways)
    assert chosen.estimate.seconds <= 1.05 * min(ways)


def test_inputs_of_blocks_go_to_a_drive_where_states_use_host_memory_better() -> None:
    paper = of_memory(128 * MIB, STATES)
    on_host = planned(paper, saved=8 * MIB, inputs=4 * MIB, micro_batch_size=1, activations="host")
    chosen = planned(paper, saved=8 * MIB, inputs=4 * MIB, micro_batch_size="auto")
    assert chosen.settings["activations"] == "nvme"
    assert chosen.estimate.seconds < 0.8 * on_host.estimate.seconds


def test_a_slice_size_that_does_not_divide_the_batch_is_an_error() -> None:
    with pytest.raises(zo.ConfigError, match="a batch of 4 is no multiple of micro_batch_size, 3"):
        planned(of_memory(2 * STATES, STATES), micro_batch_size=3)


def test_smaller_moments_are_chosen_only_if_they_are_allowed_and_quicker() -> None:
    paper = of_memory(STATES // 8, STATES)
    usual, allowed = planned(paper), planned(paper, may_use_moments=["8bit"])
    assert "moments" not in usual.settings
    assert allowed.settings["moments"] == "8bit"
    assert allowed.estimate.seconds < usual.estimate.seconds


def test_updates_go_ahead_where_steps_are_committed() -> None:
    plan = planned(of_memory(STATES // 8, STATES), params="nvme", optimizer="nvme", nvme_paths=["/paper"])
    assert plan.kind.schedule is UpdateMode.DURING_BACKWARD
    assert plan.settings["update"] == "during_backward"
    assert planned(of_memory(STATES // 8, STATES), update="after_backward").kind.schedule is UpdateMode.AFTER_BACKWARD


def test_more_memory_never_makes_a_plan_slower() -> None:
    seconds = [planned(of_memory(STATES // 8, host)).estimate.seconds for host in (STATES, 2 * STATES, 4 * STATES)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(seconds))
