"""The last step that ended: its spans, what was held, and which lane was busiest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerooffload.telemetry.spans import Lane, Span, busy_seconds, by_lane, within
from zerooffload.telemetry.timeline import MOST_SPANS, Batch, Level, Step


@dataclass(frozen=True)
class LaneUse:
    """What a lane did in a step.

    Attributes
    ----------
    busy_seconds : float
        In which it did anything.
    nbytes : int
        That moved: of what began in the step, as in its report.
    """

    lane: Lane
    busy_seconds: float
    nbytes: int

    @property
    def bytes_per_second(self) -> float | None:
        """While it was busy; None where nothing moved."""
        return self.nbytes / self.busy_seconds if self.nbytes and self.busy_seconds else None


@dataclass(frozen=True)
class StepPicture:
    """A step, cut out of the timeline.

    Attributes
    ----------
    spans : Sequence[Span]
        Within the step, cut at its ends.
    levels : Mapping[str, Sequence[Level]]
        Bytes held, by name; the first level of each is from the step's beginning or before.
    num_left_out : int
        Spans that were too many to be kept.
    """

    step: Step
    spans: Sequence[Span]
    levels: Mapping[str, Sequence[Level]]
    num_left_out: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.step.end_seconds - self.step.begin_seconds

    def uses(self) -> list[LaneUse]:
        """Of every lane that was busy, in their order; stalls keep nothing busy."""
        lanes = by_lane(self.spans)
        return [
            LaneUse(lane, busy_seconds(spans), sum(span.nbytes for span in spans if self._began(span)))
            for lane, spans in lanes.items()
            if lane is not Lane.STALL
        ]

    def _began(self, span: Span) -> bool:
        return span.begin_seconds > self.step.begin_seconds

    def bound(self) -> LaneUse | None:
        """The lane that was busiest: with everything else hidden behind it, the step would take its time."""
        return max(self.uses(), key=lambda use: use.busy_seconds, default=None)


class LastStep:
    """Keeps the last step of a timeline, and what comes behind it; see `Listener`."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._num_left_out = 0

    def took(self, batch: Batch) -> bool:
        """Forget what is older than the last step. Always wants more."""
        self._spans += batch.spans
        self._levels += batch.levels
        if batch.step is not None:
            begin = batch.step.begin_seconds
            self._step = batch.step
            self._spans = [span for span in self._spans if span.end_seconds > begin]
            before = {level.name: level for level in self._levels if level.seconds <= begin}
            self._levels = [*before.values(), *(level for level in self._levels if level.seconds > begin)]
            self._num_left_out = 0
        elif len(self._spans) > 2 * MOST_SPANS:
            self._num_left_out += len(self._spans) - 2 * MOST_SPANS
            del self._spans[2 * MOST_SPANS :]
        return True

    def picture(self) -> StepPicture | None:
        """The step; None before one has ended."""
        if self._step is None:
            return None
        begin, end = self._step.begin_seconds, self._step.end_seconds
        levels: dict[str, list[Level]] = {}
        for level in self._levels:
            if level.seconds <= end:
                levels.setdefault(level.name, []).append(level)
        return StepPicture(self._step, list(within(self._spans, begin, end)), levels, self._num_left_out)
