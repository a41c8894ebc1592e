"""Calibrations as short as can be."""

from __future__ import annotations

from zerooffload.calibration import Effort
from zerooffload.formats import MIB

SHORT = Effort(
    rounds=2,
    turn_seconds=0.001,
    drive_turn_seconds=0.005,
    fill_seconds=0.2,
    sustained_seconds=0.02,
    pin_seconds=0.0,
    array_bytes=MIB,
    file_bytes=128 * MIB,
)
