"""The power goes while a run begins, ends without a step, or takes the place of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.drive_images import KEEP, Image, systematic_images
from support.durable_training import Reference, Scenario, real_environment, recording_environment, training
from support.power_cuts import Resumptions, folder_with
from support.recording_engine import Log, recording

import zerooffload as zo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Uninterrupted = Callable[[Scenario], Reference]

SCENARIOS = {"one path": Scenario(num_batches=2), "two paths": Scenario(num_batches=2, num_paths=2)}


def begun_and_ended(scenario: Scenario, folder: Path, **fields: Any) -> Log:
    """The log of a run without a step."""
    scenario.paths(folder)
    with recording(folder) as log, training(scenario, folder, recording_environment(log), **fields) as run:
        assert run.resume() == 0
    return log


def images_of(log: Log) -> list[Image]:
    """Different ones."""
    images = {image.key: image for drive in log.drives() for image in systematic_images(drive, thoroughly=False)}
    return list(images.values())


def has_all_manifests(image: Image, scenario: Scenario) -> bool:
    """Whether a run in it has begun."""
    return sum(name.endswith("/manifest.json") for name in image.files) == scenario.num_paths


@pytest.mark.parametrize("kind", SCENARIOS)
def test_cut_while_a_run_begins_or_ends_without_a_step(kind: str, uninterrupted: Uninterrupted, scratch: Path) -> None:
    scenario = SCENARIOS[kind]
    resumptions = Resumptions(scenario, uninterrupted(scenario), scratch)
    for image in images_of(begun_and_ended(scenario, scratch / "first")):
        assert resumptions.step_of(image) == 0


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", SCENARIOS)
def test_cut_again_while_the_next_run_begins(
    kind: str,
    backwards: bool,  # noqa: FBT001
    uninterrupted: Uninterrupted,
    scratch: Path,
) -> None:
    """What a run without a step left is forgotten on the way."""
    scenario = SCENARIOS[kind]
    resumptions = Resumptions(scenario, uninterrupted(scenario), scratch)
    first = begun_and_ended(scenario, scratch / "first")
    left = [drive.image(lambda _: KEEP) for drive in first.drives()]
    begun = [image for image in left if has_all_manifests(image, scenario)]
    for number, image in enumerate((left[0], begun[0])):
        with folder_with(image, scratch) as folder:
            paths = scenario.paths(folder)[:: -1 if backwards else 1]
            again = begun_and_ended(scenario, folder, nvme_paths=paths)
            for second in images_of(again)[number::2]:
                assert resumptions.step_of(second) == 0


@pytest.mark.parametrize("kind", SCENARIOS)
def test_cut_while_a_run_is_overwritten(kind: str, uninterrupted: Uninterrupted, scratch: Path) -> None:
    """The old run or none: what is resumed is right, or refused; and overwriting it can be repeated."""
    scenario = SCENARIOS[kind]
    reference = uninterrupted(scenario)
    with training(scenario, scratch / "old", real_environment()) as run:
        run.finish()
    log = begun_and_ended(scenario, scratch / "old", overwrite=True)
    resumptions = Resumptions(scenario, reference, scratch)
    refused = []
    for number, image in enumerate(images_of(log)):
        try:
            # The old run's steps are 2 and 1.
            assert resumptions.step_of(image) in (0, 1, 2)
        except zo.CheckpointError as error:
            refused.append(str(error))
        if number % 4 == 0:
            with (
                folder_with(image, scratch) as folder,
                training(scenario, folder, real_environment(), overwrite=True) as run,
            ):
                assert run.resume() == 0
                assert reference.moments[0].differences(run.moment()) == []
    assert refused
    assert all("drive-" in text for text in refused)
