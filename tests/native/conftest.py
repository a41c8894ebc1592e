from __future__ import annotations

from pathlib import Path

import pytest
from support.native_build import build


@pytest.fixture(scope="session")
def plain_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests' program, without sanitizers, and the object files that it was linked from."""
    return build(tmp_path_factory.mktemp("plain"), "")
