"""The power goes at any moment: `zo.resume` finds the newest step that was committed, and all of it, to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.drive_images import BLOCK_BYTES, KEEP, Committed, chosen_pieces
from support.durable_training import ALL_ON_NVME, Reference, Scenario
from support.power_cuts import Resumptions, any_image, check_all_prefixes, folder_with, recorded_run
from support.thoroughness import one_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Uninterrupted = Callable[[Scenario], Reference]

EVERYTHING = {**ALL_ON_NVME, "gradients": "nvme"}
SHORT = {
    "fp32": Scenario(),
    "bf16, gradients on nvme": Scenario(config={**EVERYTHING, "compute_dtype": "bf16"}),
    "fp16 with a skipped step": Scenario(
        num_batches=4, overflows=(2,), config={**ALL_ON_NVME, "compute_dtype": "fp16"}
    ),
    "durable, on host": Scenario(evaluates=True, config={"params": "host", "optimizer": "host", "durable": True}),
    "durable, mixed": Scenario(
        config={"params": "nvme", "optimizer": "device", "durable": True, "compute_dtype": "bf16"}
    ),
    "two paths": Scenario(num_paths=2),
    "edits after steps": Scenario(edits=True, config={**ALL_ON_NVME, "compute_dtype": "bf16"}),
    "edits after steps, durable": Scenario(
        edits=True, config={"params": "host", "optimizer": "nvme", "durable": True, "compute_dtype": "bf16"}
    ),
}
LONG = {
    "bf16, gradients on nvme": Scenario(
        num_batches=9, width=72, num_blocks=3, config={**EVERYTHING, "compute_dtype": "bf16"}
    ),
    "fp16, two paths": Scenario(
        num_batches=10,
        width=72,
        num_blocks=3,
        overflows=(2, 5, 6),
        num_paths=2,
        config={**EVERYTHING, "compute_dtype": "fp16"},
    ),
    "durable": Scenario(
        num_batches=9, width=72, num_blocks=3, config={"params": "host", "optimizer": "nvme", "durable": True}
    ),
}
"""Of 5,256 parameters a block: two chunks each."""


@pytest.mark.parametrize("kind", SHORT)
def test_any_prefix_with_any_one_write_lost_or_torn(kind: str, uninterrupted: Uninterrupted, scratch: Path) -> None:
    scenario = SHORT[kind]
    resumptions = Resumptions(scenario, uninterrupted(scenario), scratch)
    log = recorded_run(scenario, scratch / "recorded")
    reached = check_all_prefixes(log, resumptions, thoroughly=kind == "fp32")
    assert reached == set(range(len(resumptions.reference.moments)))


@pytest.mark.parametrize("kind", ["fp32", "edits after steps"])
def test_any_prefix_of_a_run_that_commits_in_the_background(
    kind: str, uninterrupted: Uninterrupted, scratch: Path
) -> None:
    scenario = SHORT[kind]
    resumptions = Resumptions(scenario, uninterrupted(scenario), scratch, in_background=True)
    log = recorded_run(scenario, scratch / "recorded", in_background=True)
    reached = check_all_prefixes(log, resumptions, thoroughly=False)
    assert reached == set(range(len(resumptions.reference.moments)))


@pytest.mark.parametrize("kind", LONG)
def test_any_subset_of_writes_lost_or_torn(
    kind: str, uninterrupted: Uninterrupted, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    scenario = LONG[kind]
    resumptions = Resumptions(scenario, uninterrupted(scenario), scratch)
    log = recorded_run(scenario, scratch / "recorded")
    # The start is gone through above.
    begins = next(number for number, event in enumerate(log.events) if isinstance(event, Committed))

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=True))
    def any_cut(choice: random.Random) -> None:
        drive = log.drive_after(choice.randrange(begins, len(log.events) + 1))
        resumptions.check(any_image(drive, choice), drive)

    any_cut()


def test_cut_again_while_resuming_and_after(uninterrupted: Uninterrupted, scratch: Path) -> None:
    """From a directory whose newest record is torn, and from one where it is whole: any prefix of what follows."""
    scenario = SHORT["fp32"]
    resumptions = Resumptions(scenario, uninterrupted(scenario), scratch)
    log = recorded_run(scenario, scratch / "recorded")
    in_between = [drive.image(lambda _: KEEP) for drive in log.drives() if drive.committed == 1]
    # The record of step 2 is written, and nobody has waited for it.
    tear = chosen_pieces(0b1110, BLOCK_BYTES)
    torn = in_between[0]
    for drive in log.drives():
        if drive.committed == 1 and drive.uncertain:
            newest = max(drive.uncertain)
            torn = drive.image({**dict.fromkeys(drive.uncertain, KEEP), newest: tear}.__getitem__)
    for image in (in_between[0], in_between[len(in_between) // 2], torn):
        with folder_with(image, scratch) as folder:
            again = recorded_run(scenario, folder, committed=1)
            assert min(check_all_prefixes(again, resumptions, thoroughly=False)) >= 1


def hidden(scenario: Scenario, update: str) -> Scenario:
    return replace(scenario, config={**scenario.config, "update": update, "accumulation_steps": 1})


UPDATES = ("under_next_forward", "during_backward")
CASES = [
    (kind, UPDATES[number])
    for place, kind in enumerate(list(SHORT)[:: one_in(2)])
    for number in range(2)[place % one_in(2) :: one_in(2)]
]
"""With ZEROOFFLOAD_TEST_EXHAUSTIVE=1 both ways of hiding for each kind, else one for every second."""


@pytest.mark.parametrize(("kind", "update"), CASES)
def test_any_prefix_of_a_run_whose_updates_are_hidden(
    kind: str, update: str, uninterrupted: Uninterrupted, scratch: Path
) -> None:
    """In the background, as they are; what is resumed has the bits of a run in which nothing is hidden."""
    scenario = hidden(SHORT[kind], update)
    resumptions = Resumptions(scenario, uninterrupted(SHORT[kind]), scratch, in_background=True)
    log = recorded_run(scenario, scratch / "recorded", in_background=True)
    reached = check_all_prefixes(log, resumptions, thoroughly=False)
    assert reached == set(range(len(resumptions.reference.moments)))


@pytest.mark.parametrize(
    ("kind", "update"), [("bf16, gradients on nvme", "during_backward"), ("durable", "under_next_forward")]
)
def test_any_subset_of_the_writes_of_hidden_updates_lost_or_torn(
    kind: str, update: str, uninterrupted: Uninterrupted, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    scenario = hidden(LONG[kind], update)
    resumptions = Resumptions(scenario, uninterrupted(LONG[kind]), scratch, in_background=True)
    log = recorded_run(scenario, scratch / "recorded", in_background=True)
    begins = next(number for number, event in enumerate(log.events) if isinstance(event, Committed))

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=True))
    def any_cut(choice: random.Random) -> None:
        drive = log.drive_after(choice.randrange(begins, len(log.events) + 1))
        resumptions.check(any_image(drive, choice), drive)

    any_cut()
