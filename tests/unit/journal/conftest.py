from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.hostile_files import sample_manifest

if TYPE_CHECKING:
    from zerooffload.journal import Manifest


@pytest.fixture
def manifest() -> Manifest:
    """Of one flat with two states of two chunks each."""
    return sample_manifest()
