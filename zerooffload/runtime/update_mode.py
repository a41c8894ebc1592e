"""When a step's update runs. Pure.

Each mode gives the same bits; what differs is what the update is hidden behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerooffload.config import UpdateMode
from zerooffload.errors import InternalError

_MOST_CLIP_RATE = 0.3
"""A step that clips redoes what was begun ahead of it: its reads and writes were for nothing."""
_NEWEST_WEIGHT = 0.25
"""Of the last step in the running rate: one that clips leaves updates ahead, two in a row end them for some steps."""


@dataclass
class ModeChooser:
    """Chooses the mode of each step.

    Attributes
    ----------
    wanted : UpdateMode or "auto"
    uses_other_resources : bool
        Whether the update uses what compute does not: a drive, or, beside a device, the host.
    clip_rate : float
        How many of the last steps clipped, a running mean.
    """

    wanted: UpdateMode | Literal["auto"]
    uses_other_resources: bool
    clip_rate: float = 0.0

    def __post_init__(self) -> None:
        by_rule = UpdateMode.DURING_BACKWARD if self.uses_other_resources else UpdateMode.AFTER_BACKWARD
        self._aim = by_rule if self.wanted == "auto" else self.wanted

    @property
    def hides(self) -> bool:
        """Whether updates go on behind the training thread when `optimizer.step()` has returned."""
        return self._aim is not UpdateMode.AFTER_BACKWARD

    @property
    def goes_ahead(self) -> bool:
        """Whether updates begin during the last backward, where a second place allows it."""
        may = self.wanted != "auto" or not self.clips_often
        return self._aim is UpdateMode.DURING_BACKWARD and may

    @property
    def clips_often(self) -> bool:
        """Whether what is begun ahead is for nothing too often."""
        return self.clip_rate > _MOST_CLIP_RATE

    @property
    def mode(self) -> UpdateMode:
        """Of the step under way."""
        if self.goes_ahead:
            return UpdateMode.DURING_BACKWARD
        return UpdateMode.UNDER_NEXT_FORWARD if self.hides else UpdateMode.AFTER_BACKWARD

    def aim_at(self, mode: UpdateMode) -> None:
        """From the next step on, what "auto" means: still not ahead while steps clip.

        Raises
        ------
        InternalError
            If another mode is wanted.
        """
        if self.wanted != "auto":
            raise InternalError(f"updates are to run {self.wanted}, not {mode}")
        self._aim = mode

    def stepped(self, *, clipped: bool) -> None:
        """A step is decided; `clipped` tells whether clipping changed its gradients."""
        self.clip_rate += _NEWEST_WEIGHT * (clipped - self.clip_rate)
