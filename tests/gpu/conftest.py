from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from support.folders import leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.reference_training import Outcome, Recipe

# cuBLAS reads it once, when it is first used; without it, it may choose another order of additions each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """A user's folder; a run that ended has left nothing in it but what it committed."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    yield folder
    assert leftovers(folder) == []


@pytest.fixture(scope="session")
def plain_on_cuda() -> Callable[[Recipe], Outcome]:
    """Plain training on the device, done once for each recipe."""
    from support.reference_training import train_plain  # noqa: PLC0415 - imports transformers

    done: dict[int, tuple[Recipe, Outcome]] = {}

    def train(recipe: Recipe) -> Outcome:
        if id(recipe) not in done:
            done[id(recipe)] = (recipe, train_plain(recipe, "cuda"))
        return done[id(recipe)][1]

    return train
