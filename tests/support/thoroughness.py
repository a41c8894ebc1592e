"""How much is gone through of what is too much for every run: all of it with ZEROOFFLOAD_TEST_EXHAUSTIVE=1."""

from __future__ import annotations

import os

EXHAUSTIVE = os.environ.get("ZEROOFFLOAD_TEST_EXHAUSTIVE", "0") not in {"", "0"}


def one_in(number: int) -> int:
    """A stride: 1 if all is to be gone through."""
    return 1 if EXHAUSTIVE else number
