from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.calibration import figure_of
from zerooffload.calibration.profile import median_and_spread, profile_of
from zerooffload.errors import ConfigError, InternalError

FACTS: dict[str, Any] = {
    "name": "fake",
    "device": {"memory": "24GB"},
    "host": {"memory": "64GB", "cores": 8},
    "drives": [
        {"path": "/a", "mixed": [{"read_part": 0.25}, {"read_part": 0.5}]},
        {"path": "/b"},
    ],
}
SAMPLES = {
    "device.matmul_flops.bf16": [1e14],
    "device.memory_bandwidth": [1e12],
    "device.operation_seconds": [4e-6, 5e-6, 6e-6],
    "device.copy_in": [2.4e10, 2.6e10, 2.5e10],
    "device.copy_out": [2.5e10],
    "host.memory_bandwidth": [8e10],
    "drives.0.read": [7e9, 5e9, 6e9, 8e9, 4e9],
    "drives.0.write": [5e9],
    "drives.0.mixed.0.rate": [4e9],
    "drives.0.mixed.1.rate": [3.123456e9],
    "drives.1.read": [2e9],
    "drives.1.write": [1e9],
    "drives.1.sustained_write": [5e8],
}


def test_each_median_is_where_its_name_says() -> None:
    profile = profile_of(FACTS, SAMPLES)
    assert profile.device.matmul_flops == {"bf16": 1e14}
    assert profile.device.copy_in == 2.5e10
    assert profile.device.copy_both is None
    assert profile.device.operation_seconds == 5e-6
    assert profile.drives[0].read == 6e9
    assert [(mix.read_part, mix.rate) for mix in profile.drives[0].mixed] == [(0.25, 4e9), (0.5, 3.123e9)]
    assert profile.drives[1].sustained_write == 5e8
    assert profile.drives[1].mixed == ()
    # The quartiles of 4 to 8 are 5 and 7.
    assert profile.spread["drives.0.read"] == 0.3333
    assert profile.spread.keys() == SAMPLES.keys()
    assert FACTS["drives"][1] == {"path": "/b"}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_figure_is_found_by_its_name(name: str) -> None:
    profile = profile_of(FACTS, SAMPLES)
    assert figure_of(profile, name) == pytest.approx(sorted(SAMPLES[name])[len(SAMPLES[name]) // 2], rel=1e-3)


def test_a_figure_that_the_profile_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="write"):
        profile_of(FACTS, {name: values for name, values in SAMPLES.items() if name != "drives.1.write"})


def test_one_sample_has_no_spread() -> None:
    assert median_and_spread([3.0]) == (3.0, 0.0)
    with pytest.raises(InternalError):
        median_and_spread([])


@given(st.lists(st.floats(1, 1e12), min_size=2, max_size=20), st.floats(0.5, 8))
def test_the_spread_is_a_part_of_the_median_whatever_the_unit(samples: list[float], unit: float) -> None:
    median, spread = median_and_spread(samples)
    assert min(samples) <= median <= max(samples)
    assert 0 <= spread <= (max(samples) - min(samples)) / median * (1 + 1e-12)
    assert median_and_spread([unit * sample for sample in samples]) == pytest.approx((unit * median, spread))
