from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload import native
from zerooffload.aio import Engine, OpenFile, choose_engine
from zerooffload.aio.files import create_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=["threads", "aiofiles"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine in turn."""
    if request.param == "threads" and not native.available:
        pytest.skip(f"no native module: {native.why_unavailable}")
    chosen = choose_engine(request.param).engine
    yield chosen
    chosen.close()


@pytest.fixture
def new_file(tmp_path: Path) -> Iterator[Callable[[], OpenFile]]:
    """Makes empty files that are closed at the end."""
    files: list[OpenFile] = []

    def make() -> OpenFile:
        files.append(create_file(tmp_path / f"file-{len(files)}"))
        return files[-1]

    yield make
    for file in files:
        file.close()
