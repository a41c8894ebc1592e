"""How much a calibration takes of time, memory and drives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerooffload.formats import GIB, MIB

_NUM_DRIVES_AT_LEISURE = 2


@dataclass(frozen=True)
class Effort:
    """What is spent.

    Attributes
    ----------
    rounds : int
        Turns of each figure.
    turn_seconds, drive_turn_seconds : float
        Of a turn of device and host, and of a drive.
    fill_seconds, sustained_seconds : float
        For which a drive's file is written for the first time, and at last without a break.
    pin_seconds : float
        For which memory is pinned, to see how much can be.
    array_bytes : int
        Of each array in memory: more than caches hold.
    file_bytes : int
        Of a drive's file, where that much is free.
    """

    rounds: int = 7
    turn_seconds: float = 0.15
    drive_turn_seconds: float = 0.3
    fill_seconds: float = 1.5
    sustained_seconds: float = 2.5
    pin_seconds: float = 2.0
    array_bytes: int = 128 * MIB
    file_bytes: int = 4 * GIB

    def for_drives(self, num_drives: int) -> Effort:
        """The time that two drives take is what more of them share."""
        share = min(1.0, _NUM_DRIVES_AT_LEISURE / max(1, num_drives))
        return replace(
            self,
            drive_turn_seconds=self.drive_turn_seconds * share,
            fill_seconds=self.fill_seconds * share,
            sustained_seconds=self.sustained_seconds * share,
        )
