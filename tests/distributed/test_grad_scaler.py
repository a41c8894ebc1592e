"""A gradient that overflows on one rank lets all of them skip the step."""

from __future__ import annotations

import math

import pytest
import torch
from support.ranks import run_ranks
from support.scaled import OVERFLOWING, train_scaled


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_all_ranks_skip_together(moments: str) -> None:
    results = run_ranks(train_scaled, 2, moments)
    _, bad = OVERFLOWING
    for result in results:
        assert result["scales"] == [256.0, 128.0, 128.0]
        assert not math.isfinite(result["norms"][bad])
        for step in range(3):
            same = all(
                torch.equal(result["params"][step][name], value) for name, value in result["params"][step + 1].items()
            )
            assert same == (step == bad)
        for one, other in zip(result["params"], results[0]["params"], strict=True):
            assert all(torch.equal(one[name], value) for name, value in other.items())


def test_the_noise_of_few_bits_does_not_depend_on_the_number_of_ranks() -> None:
    """Every rank has the same batch, so the mean of two is that of one, bit for bit, and so is the rounding."""
    (one,) = run_ranks(train_scaled, 1, "8bit")
    two = run_ranks(train_scaled, 2, "8bit")[0]
    # Before the step that overflows on the second rank alone.
    for name, value in one["params"][1].items():
        assert torch.equal(two["params"][1][name], value)
