"""Resuming from what a power cut left, and comparing everything with the run that was never interrupted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.drive_images import Image
from support.durable_training import Reference, Scenario, real_environment, recording_environment, training
from support.recording_engine import Log, recording

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

    def check(self, image: Image, committed: int) -> int:
        """See that this is the step that was said to be committed, or the one after it."""
        step = self.step_of(image)
        assert committed <= step <= committed + 1, f"resumed at step {step}, step {committed} was committed"
        return step

    def _resumed(self, folder: Path) -> int:
        environment = real_environment(in_background=self._in_background)
        with training(self.scenario, folder, environment) as run:
            step = run.resume()
            assert step < len(self.reference.moments)
            assert self.reference.moments[step].differences(run.moment()) == []
            if len(self._steps) % TRAINED_ON:
                return step
            expected = self.reference.losses[run.loader.position :]
            assert run.finish() == expected
            assert self.reference.last is not None
            assert self.reference.last.differences(run.moment()) == []
        return step


def recorded_run(scenario: Scenario, folder: Path, *, committed: int = 0, in_background: bool = False) -> Log:
    """The log of a run in a folder, from its beginning or from where it was cut, to its end."""
    scenario.paths(folder)
    with (
        recording(folder, committed=committed) as log,
        training(scenario, folder, recording_environment(log, in_background=in_background)) as run,
    ):
        assert run.resume() == committed
        run.finish()
    return log
