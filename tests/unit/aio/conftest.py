from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload.aio import Engine, OpenFile, choose_engine
from zerooffload.aio.choose import _why_not
from zerooffload.aio.files import create_file
from zerooffload.aio.setups import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(params=["uring", "uring-pieces", "threads", "threads-pieces", "aiofiles"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine in turn; "pieces" are so small that transfers are cut into more than there are places for."""
    name, _, pieces = request.param.partition("-")
    if why := "" if name == "aiofiles" else _why_not(name):
        pytest.skip(why)
    opened = Setup(name, 3, 4096).open() if pieces else choose_engine(name).engine
    yield opened
    opened.close()


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
