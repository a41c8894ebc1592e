from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

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


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """These tensors are small: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
