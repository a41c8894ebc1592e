"""Whatever fails in hidden work: never a wrong number, never a hang, and a new run comes to the bit-equal end.

What fails ahead of its step may be done again in it; everything else is told by the next call that waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.faulted_training import FaultedTraining, Scenario
from support.hidden_turns import Hidden, hidden_updates
from support.reference_training import Recipe, train_plain
from support.simulated_engine import FAULT_KINDS, Fault, Transfers
from support.thoroughness import one_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [pytest.mark.usefixtures("small_chunks", "no_cache"), pytest.mark.timeout(60)]

RECIPE = Recipe(num_steps=4, num_micro_steps=1, accumulation_steps=1, schedule=lambda step: 1.0 / (1 + step))
"""The third step clips, and so does again what was begun."""
NVME: dict[str, Any] = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
HALF: dict[str, Any] = {"params": "host", "optimizer": "nvme", "gradients": "host"}
DURABLE: dict[str, Any] = {"params": "host", "optimizer": "host", "gradients": "nvme", "durable": True}
SCENARIOS = {
    "nvme, ahead": Scenario(recipe=RECIPE, config={**NVME, "update": "during_backward"}),
    "nvme, under the forward": Scenario(recipe=RECIPE, config={**NVME, "update": "under_next_forward"}),
    "nvme, ahead, in the background": Scenario(
        recipe=RECIPE,
        transfers=Transfers.THREADED,
        in_background=True,
        config={**NVME, "update": "during_backward"},
    ),
    "nvme, ahead, on a device": Scenario(
        recipe=RECIPE, on_device=True, in_background=True, config={**NVME, "update": "during_backward"}
    ),
    "nvme, ahead, straight to a device": Scenario(
        recipe=RECIPE, on_device=True, straight=True, config={**NVME, "update": "during_backward"}
    ),
    "half": Scenario(recipe=RECIPE, config={**HALF, "update": "during_backward"}),
    "half, on a device": Scenario(recipe=RECIPE, on_device=True, config={**HALF, "update": "during_backward"}),
    "durable": Scenario(recipe=RECIPE, in_background=True, config={**DURABLE, "update": "under_next_forward"}),
}

LASTING_FIRST = sorted(FAULT_KINDS, key=lambda kind: "then" not in FAULT_KINDS[kind])


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_at_any_position_of_a_step(name: str, memory_folder: Path) -> None:
    faulted = FaultedTraining(SCENARIOS[name], train_plain(RECIPE), memory_folder)
    check_at(faulted, faulted.positions[:: one_in(3)], LASTING_FIRST)


@pytest.mark.parametrize("hidden", [Hidden.LATE, Hidden.AT_ONCE])
@pytest.mark.parametrize("name", ["nvme, ahead, on a device", "durable"])
def test_whenever_it_is_met(name: str, hidden: Hidden, memory_folder: Path) -> None:
    with hidden_updates(hidden):
        faulted = FaultedTraining(SCENARIOS[name], train_plain(RECIPE), memory_folder)
        check_at(faulted, faulted.positions[:: one_in(6)], ["a vanished device", "EIO"])


def check_at(faulted: FaultedTraining, positions: Sequence[tuple[str, int]], kinds: Sequence[str]) -> None:
    """The kinds in turns. One that lasts is told, whatever was done again: each later step uses the drive, too."""
    assert positions
    for number, (operation, at) in enumerate(positions):
        kind = FAULT_KINDS[kinds[number % len(kinds)]]
        told = faulted.check_hidden(Fault(at=at, operation=operation, **kind))
        assert told or "then" not in kind
