from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload import native

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGETS = native.module.supported_targets() if native.available else []


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each CPU target that this machine has, in turn the active one."""
    before = native.module.active_target()
    native.module.set_target(request.param)
    yield request.param
    native.module.set_target(before)
