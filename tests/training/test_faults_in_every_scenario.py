"""What is trained in the tests of this folder, on a drive that fails at any moment of a step, in any way.

Each scenario meets some kinds of fault at some positions; with ZEROOFFLOAD_TEST_EXHAUSTIVE=1 each sort of fault at
every position of the step. With --log-file and --log-file-level=INFO pytest tells how many those are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.environments import PAIRWISE, least_memory
from support.faulted_training import OPERATIONS, FaultedTraining, Scenario
from support.reference_training import Outcome, Recipe
from support.simulated_engine import FAULT_KINDS, Fault, Transfers, one_of_each_sort
from support.small_models import MODELS
from support.thoroughness import EXHAUSTIVE
from support.training_recipes import LOOPS, OPTIMIZER_RECIPES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.usefixtures("small_chunks", "no_cache"),
    pytest.mark.timeout(1800 if EXHAUSTIVE else 60),
]

_log = logging.getLogger(__name__)

STATES = ("params", "optimizer", "gradients")
ON_NVME: dict[str, Any] = dict.fromkeys(STATES, "nvme")
LATE_STEPS = {"evaluation": 2, "generation": 3}
"""Of what a loop does only after some steps."""


def loops() -> dict[str, Scenario]:
    """Each on the least window, every other one on a device."""
    found = {}
    for number, (name, recipe) in enumerate(LOOPS.items()):
        step = LATE_STEPS.get(name, 1)
        transfers = (Transfers.LAZY, Transfers.EAGER)[number // 2 % 2]
        found[name] = Scenario(
            recipe=replace(recipe, num_steps=step + 2),
            step=step,
            on_device=bool(number % 2),
            transfers=transfers,
            # Nobody zeroes the gradients of the others, and they count in the norm.
            goes_on=name != "a part of the model",
            config={**ON_NVME, "host_memory": "16MiB", "device_memory": "least"},
        )
    return found


def optimizers() -> dict[str, Scenario]:
    """Every other one with some of its states in memory, so that nothing is committed."""
    homes = [ON_NVME, {"params": "host", "optimizer": "nvme", "gradients": "device"}]
    return {
        "-".join(map(str, key)): Scenario(recipe=replace(recipe, num_steps=3), config=homes[number % 3 == 2])
        for number, (key, recipe) in enumerate(OPTIMIZER_RECIPES.items())
    }


def placements() -> dict[str, Scenario]:
    """Pairs of tiers, and what else can be said of a drive."""
    recipes = [
        Recipe(build=build, num_steps=3, compute_dtype=dtype) for dtype in (None, "bf16") for build in MODELS.values()
    ]
    on_drives = [homes for homes in PAIRWISE if "nvme" in homes]
    found = {
        "-".join(homes): Scenario(recipe=recipes[number % 4], config=dict(zip(STATES, homes, strict=True)))
        for number, homes in enumerate(on_drives)
    }
    tight = {"params": "nvme", "optimizer": "host", "gradients": "nvme", "device_memory": "least"}
    in_memory = {"params": "host", "optimizer": "host", "gradients": "nvme", "durable": True}
    return {
        **found,
        "tight": Scenario(recipe=recipes[0], config=tight),
        "tight, bf16": Scenario(recipe=recipes[2], config=tight),
        "durable": Scenario(recipe=recipes[0], config=in_memory),
        "durable, bf16": Scenario(recipe=recipes[3], config={**in_memory, "params": "nvme"}),
        "one slot": Scenario(recipe=recipes[0], config={**ON_NVME, "atomic_steps": False}),
        "two paths": Scenario(recipe=recipes[0], num_paths=2, config=ON_NVME),
        "verified reads": Scenario(recipe=recipes[2], config={**ON_NVME, "verify_reads": True}),
    }


SCENARIOS = {**loops(), **optimizers(), **placements()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_error_or_the_right_numbers(name: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    scenario = SCENARIOS[name]
    if scenario.config.get("device_memory") == "least":
        scenario = replace(scenario, config=with_least_window(scenario, nvme))
    training = FaultedTraining(scenario, plain(scenario.recipe), nvme)
    for (operation, at), kind in chosen(training, list(SCENARIOS).index(name)):
        training.check(Fault(at=at, operation=operation, **FAULT_KINDS[kind]))
    _log.info("%s: %d positions", name, len(training.positions))


def with_least_window(scenario: Scenario, nvme: Path) -> dict[str, Any]:
    config = {**scenario.config, "device_memory": None}
    with scenario.environment() as environment:
        return {
            **config,
            "device_memory": least_memory(scenario.recipe, environment, "device_memory", nvme_paths=[nvme], **config),
        }


def chosen(training: FaultedTraining, number: int) -> list[tuple[tuple[str, int], str]]:
    """All positions and sorts; or a position of two operations, other ones for each scenario."""
    if EXHAUSTIVE:
        return [(position, kind) for position in training.positions for kind in one_of_each_sort(position[1])]
    kinds = itertools.islice(itertools.cycle(FAULT_KINDS), number, None)
    found = []
    for operation in (OPERATIONS[number % 3], OPERATIONS[(number + 1) % 3]):
        positions = [position for position in training.positions if position[0] == operation]
        if positions:
            # What a loop does after a step comes last.
            at = -1 if training.scenario.acts_between else 7 * number
            found.append(positions[at % len(positions)])
    return list(zip(found, kinds, strict=False))
