"""A run that cannot be built, or not ended in order, gives back all that it took: also while the error is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.environments import simulated

import zerooffload as zo
from zerooffload.runtime import build
from zerooffload.runtime.gradients import GradientPath
from zerooffload.runtime.resources import Resources
from zerooffload.runtime.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

STEPS = [
    (build, "_update_policy"),
    (build, "Run"),
    (GradientPath, "__init__"),
    (build, "_hand_over"),
    (build, "register"),
    (Run, "install"),
    (build, "slice_blocks"),
]


class _WrongError(Exception):
    """What no part of the package raises."""


@pytest.mark.parametrize(("owner", "name"), STEPS)
def test_whatever_fails_after_its_memory_was_taken(
    owner: Any, name: str, make_net: Callable[[], nn.Module], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Resources] = []

    def take(*args: Any, **keywords: Any) -> Resources:
        taken.append(Resources(*args, **keywords))
        return taken[-1]

    def fail(*_: object, **__: object) -> None:
        raise _WrongError

    monkeypatch.setattr(build, "Resources", take)
    settings = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme_paths=[nvme], atomic_steps=False)
    with simulated() as environment:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(_WrongError) as error:
                build.build_run(make_net(), settings, environment)
        # The error holds the frames, and they hold what was made in them.
        assert error.traceback
        assert [usage.leased_bytes for usage in taken[0].usage()] == [0, 0, 0]
        assert not any(directory.is_held for directory in taken[0].nvme.directories)
        with simulated() as another:
            build.build_run(make_net(), settings, another).close()


def test_a_copy_that_failed_keeps_nothing_when_the_run_ends(
    make_net: Callable[[], nn.Module], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme_paths=[nvme], atomic_steps=False)
    with simulated() as environment:
        resources = build.build_run(make_net(), settings, environment)._resources

        def fail(*_: object) -> None:
            raise _WrongError

        with monkeypatch.context() as patch:
            patch.setattr(environment.accelerator, "record", fail)
            with pytest.raises(_WrongError):
                resources.close()
        assert [usage.leased_bytes for usage in resources.usage()] == [0, 0, 0]
        assert not any(directory.is_held for directory in resources.nvme.directories)
