"""Who holds a run to a plan while it trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from zerooffload.planner.cost import Estimate
from zerooffload.planner.held import Comparison

if TYPE_CHECKING:
    from zerooffload.train.loop import StepRecord, TrainingResult
    from zerooffload.train.recipe import Recipe


@dataclass(kw_only=True)
class HeldRun:
    """A run beside its prediction. Grows while it runs.

    Attributes
    ----------
    estimate : Estimate
        Made when the model was on its tiers, before the first step.
    probe_step : int, optional
        The step that was compared; None before that.
    comparisons : list[Comparison]
    notes : list[tuple[int, str]]
        What was noticed later, with the step behind which it was.
    """

    estimate: Estimate
    probe_step: int | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)


class Keeper:
    """Is asked at these moments, in this order, and says in lines what there is to say. This one has nothing to say.

    No method raises: a run does not fail for want of a plan.

    Attributes
    ----------
    held : HeldRun, optional
        None where nothing is predicted.
    """

    held: HeldRun | None = None

    def prepare(self, recipe: Recipe) -> Iterable[str]:  # noqa: ARG002 - for who plans
        """Before the process's memory is measured and anything is loaded."""
        return ()

    def begin(self, model: nn.Module, result: TrainingResult) -> Iterable[str]:  # noqa: ARG002
        """The model is on its tiers."""
        return ()

    def finished(self, record: StepRecord) -> Iterable[str]:  # noqa: ARG002
        """A step is done, and the next one has not begun: what can change between two steps may."""
        return ()
