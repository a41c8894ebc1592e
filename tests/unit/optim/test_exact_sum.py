"""Sums that do not depend on the order of what is added."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload import native
from zerooffload.optim.exact_sum import exact_sum

WAYS = ["native", "python"] if native.available else ["python"]


@pytest.fixture(params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", request.param == "native")


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.skipif(not native.available, reason="no native module")
@given(st.lists(st.floats(min_value=0.0, max_value=1e307), max_size=8), st.integers(0, 3))
def test_the_bits_of_fsum(values: list[float], doublings: int) -> None:
    many = values * 2**doublings
    assert struct.pack("d", exact_sum(doubles(many))) == struct.pack("d", math.fsum(many))


@pytest.mark.skipif(not native.available, reason="no native module")
def test_the_bits_of_fsum_of_many() -> None:
    values = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 40
    assert exact_sum(values) == math.fsum(values.tolist())
    assert exact_sum(values.flip(0)) == exact_sum(values)


@pytest.mark.usefixtures("_way")
def test_what_has_no_finite_sum() -> None:
    assert exact_sum(doubles([1.0, math.inf])) == math.inf
    assert exact_sum(doubles([1.7e308, 1.7e308])) == math.inf
    assert math.isnan(exact_sum(doubles([math.nan, math.inf])))
    assert exact_sum(doubles([])) == 0.0
    with pytest.raises(ValueError, match="none below 0"):
        exact_sum(doubles([1.0, -1.0]))
