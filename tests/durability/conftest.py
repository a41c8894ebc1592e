"""What tests of crashes and faults share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that are started: other numbers of threads cut the sums of matrix products elsewhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4096 elements, so that a block of a small model is several."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: a flush that no power cut puts to the test need not be waited for."""
    in_memory = Path("/dev/shm")  # noqa: S108 - the folder below has a name of its own
    if not in_memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        yield Path(folder)
