from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.flushes import without_fsync
from support.folders import leftovers
from support.reference_training import Outcome, Recipe, train_plain
from support.short_rings import no_cache
from support.threads import on_one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["no_cache"]

SMALL_CHUNK_NUMEL = 4096
SMALL_PAGE_NBYTES = 4096


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Such small models are slower on several threads."""
    with on_one_thread():
        yield


@pytest.fixture(autouse=True)
def _no_power_cuts() -> Iterator[None]:
    """So that no name in a folder has to be flushed."""
    with without_fsync():
        yield


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """A user's folder; a run that ended, however it ended, has left nothing in it but what it committed."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    yield folder
    assert leftovers(folder) == []


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 4096 elements, so that a block of a small model is several."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", SMALL_CHUNK_NUMEL)
    return SMALL_CHUNK_NUMEL


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pages of 4096 bytes, so that the input of a block may be several."""
    monkeypatch.setattr("zerooffload.planner.block_inputs.PAGE_NBYTES", SMALL_PAGE_NBYTES)
    return SMALL_PAGE_NBYTES


@pytest.fixture(scope="session")
def plain() -> Callable[[Recipe], Outcome]:
    """Plain training of a recipe, done once."""
    done: dict[int, tuple[Recipe, Outcome]] = {}

    def train(recipe: Recipe) -> Outcome:
        if id(recipe) not in done:
            done[id(recipe)] = (recipe, train_plain(recipe))
        return done[id(recipe)][1]

    return train
