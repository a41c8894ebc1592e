"""What tests of crashes and faults share."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from support.durable_training import Reference, Scenario, train_uninterrupted
from support.short_rings import no_cache
from support.threads import on_one_thread

from zerooffload.formats import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["no_cache"]

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("deterministic")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that are started: other numbers of threads cut the sums of matrix products elsewhere."""
    with on_one_thread():
        yield


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4096 elements, so that a block of a small model is several."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)


@pytest.fixture(scope="session")
def memory_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where hundreds of small folders come and go: in memory, if there is such a place."""
    in_memory = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
    if in_memory.is_dir() and os.access(in_memory, os.W_OK) and shutil.disk_usage(in_memory).free > 64 * MIB:
        with tempfile.TemporaryDirectory(dir=in_memory) as name:
            yield Path(name)
    else:
        yield tmp_path_factory.mktemp("memory")


@pytest.fixture
def scratch(memory_folder: Path) -> Iterator[Path]:
    """A folder for a test."""
    with tempfile.TemporaryDirectory(dir=memory_folder) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def uninterrupted(memory_folder: Path) -> Callable[[Scenario], Reference]:
    """A scenario's uninterrupted run, made once."""
    made: dict[int, tuple[Scenario, Reference]] = {}

    def reference_of(scenario: Scenario) -> Reference:
        if id(scenario) not in made:
            made[id(scenario)] = (scenario, train_uninterrupted(scenario, memory_folder / str(len(made))))
        return made[id(scenario)][1]

    return reference_of
