"""Resuming from what a power cut left, and comparing everything with the run that was never interrupted."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.drive_images import BLOCK_BYTES, SECTOR_BYTES, Drive, Fate, Image, chosen_pieces, systematic_images
from support.durable_training import (
    Reference,
    Scenario,
    Training,
    real_environment,
    recording_environment,
    training,
)
from support.recording_engine import Log, recording

from zerooffload.runtime.build import Environment

TRAINED_ON = 3


@contextmanager
def folder_with(image: Image, scratch: Path) -> Iterator[Path]:
    """A folder that holds the image's files, for a while."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        image.lay_out(Path(name))
        yield Path(name)


class Resumptions:
    """Resumes from images; each image once.

    Of what was compared, the same training follows; every so many images it is trained on all the same.

    Parameters
    ----------
    scratch : pathlib.Path
        Where they are laid out.
    in_background : bool
        How the resumed runs commit.
    """

    def __init__(self, scenario: Scenario, reference: Reference, scratch: Path, *, in_background: bool = False) -> None:
        self.scenario = scenario
        self.reference = reference
        self.scratch = scratch
        self._in_background = in_background
        self._steps: dict[bytes, int] = {}

    @property
    def num_images(self) -> int:
        """How many different ones there were."""
        return len(self._steps)

    def step_of(self, image: Image) -> int:
        """The step that a run resumes at, all of it compared."""
        key = image.key
        if key not in self._steps:
            with folder_with(image, self.scratch) as folder:
                self._steps[key] = self._resumed(folder)
        return self._steps[key]

    def check(self, image: Image, drive: Drive) -> int:
        """See that this is the step that was said to be committed, or the one after it."""
        step = self.step_of(image)
        check_step(step, drive.committed, drive.finished)
        return step

    def _resumed(self, folder: Path) -> int:
        environment = real_environment(in_background=self._in_background)
        return resumed_as(self.reference, self.scenario, folder, environment, to_the_end=self._trains_on)

    @property
    def _trains_on(self) -> bool:
        return not len(self._steps) % TRAINED_ON


def check_step(step: int, committed: int, finished: int) -> None:
    """See that a run resumes at no other step than it may."""
    told = f"resumed at step {step}, of {finished} finished ones {committed} were committed"
    assert committed <= step <= committed + 1, told
    assert finished - 1 <= step, told


def resumed_as(
    reference: Reference, scenario: Scenario, folder: Path, environment: Environment, *, to_the_end: bool
) -> int:
    """The step that a run resumes at, once everything was compared with the run that was never interrupted."""
    with training(scenario, folder, environment) as run:
        step = run.resume()
        assert step < len(reference.moments)
        assert reference.moments[step].differences(run.moment()) == []
        if to_the_end:
            expected = reference.losses[run.loader.position :]
            assert run.finish() == expected
            assert reference.last is not None
            assert reference.last.differences(run.moment()) == []
    return step


def check_all_prefixes(log: Log, resumptions: Resumptions, *, thoroughly: bool) -> set[int]:
    """Cut at each event; the steps that were resumed at."""
    return {
        resumptions.check(image, drive)
        for drive in log.drives()
        for image in systematic_images(drive, thoroughly=thoroughly)
    }


def any_image(drive: Drive, choice: random.Random) -> Image:
    """Any subset of what no flush covers, and of that some only half."""
    fates = {number: _any_fate(choice) for number in drive.uncertain}
    return drive.image(fates.__getitem__)


def _any_fate(choice: random.Random) -> Fate:
    if choice.random() < 0.5:
        return choice.random() < 0.5
    return chosen_pieces(choice.getrandbits(32), choice.choice([SECTOR_BYTES, BLOCK_BYTES]))


def recorded_run(scenario: Scenario, folder: Path, *, committed: int = 0, in_background: bool = False) -> Log:
    """The log of a run in a folder, from its beginning or from where it was cut, to its end."""
    scenario.paths(folder)
    with (
        recording(folder, committed=committed) as log,
        training(scenario, folder, recording_environment(log, in_background=in_background)) as run,
    ):
        assert run.resume() == committed
        tell_finished_steps(run, log)
        run.finish()
    return log


def tell_finished_steps(run: Training, log: Log) -> None:
    """Each when the optimizer returns."""
    run.optimizer.register_step_post_hook(lambda *_: log.finished(run.num_steps + 1))
