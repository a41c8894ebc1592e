"""A profile from samples: statistics without a machine."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zerooffload.errors import InternalError
from zerooffload.planner.profiles import MachineProfile

_NUM_DIGITS = 4
"""More than any measurement is good for."""


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles as a part of it, which one sample alone has none of."""
    if not samples:
        raise InternalError("nothing was measured")
    median = statistics.median(samples)
    if len(samples) == 1:
        return median, 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, (high - low) / median


def profile_of(facts: Mapping[str, Any], samples: Mapping[str, Sequence[float]]) -> MachineProfile:
    """What is known of a machine, with the medians of what was measured of it.

    Parameters
    ----------
    facts : Mapping[str, Any]
        The profile's fields that are not measured, nested as in a file.
    samples : Mapping[str, Sequence[float]]
        By the dotted names of fields, in which a number counts the entries of a list: "drives.0.mixed.1.rate".
    """
    values: dict[str, Any] = copy.deepcopy(dict(facts))
    spreads: dict[str, float] = {}
    for name, measured in samples.items():
        median, spread = median_and_spread(measured)
        _put(values, name.split("."), _rounded(median))
        spreads[name] = _rounded(spread)
    return MachineProfile.from_mapping({**values, "spread": spreads})


def figure_of(profile: MachineProfile, name: str) -> float:
    """A measured figure by its dotted name."""
    found: Any = profile.model_dump()
    for word in name.split("."):
        found = found[int(word) if word.isdigit() else word]
    return float(found)


def _put(values: dict[str, Any], words: Sequence[str], value: float) -> None:
    place: Any = values
    for word in words[:-1]:
        place = place[int(word)] if word.isdigit() else place.setdefault(word, {})
    place[words[-1]] = value


def _rounded(value: float) -> float:
    return float(f"{value:.{_NUM_DIGITS}g}")
