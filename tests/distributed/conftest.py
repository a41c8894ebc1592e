"""What tests of ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.threads import on_one_thread


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks: other numbers of threads cut the sums of matrix products in other places."""
    with on_one_thread():
        yield
