"""The updates of a run's steps: in which mode, and what of them runs where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerooffload.runtime.ahead import AheadUpdates, urgencies
from zerooffload.runtime.backwards import BackwardCount
from zerooffload.runtime.resources import Parts
from zerooffload.runtime.update import FlatUpdate
from zerooffload.runtime.update_job import Jobs
from zerooffload.runtime.update_mode import ModeChooser
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.unit import Unit
from zerooffload.telemetry import Wait
from zerooffload.tiers import StagingRing


@dataclass(frozen=True)
class UpdatePolicy:
    """When updates run, and which backward is the last before one."""

    mode: ModeChooser
    backwards: BackwardCount


class Updating:
    """Decides, with its policy, and lets `UpdateQueue` do it."""

    def __init__(
        self,
        queue: UpdateQueue,
        ahead: AheadUpdates,
        policy: UpdatePolicy,
        ring: StagingRing,
        parts: Parts,
    ) -> None:
        self._queue = queue
        self._ahead = ahead
        self._mode = policy.mode
        self._backwards = policy.backwards
        self._ring = ring
        self._parts = parts
        self._num_steps = 0
        self._unscale_factor = 1.0
        self._max_norm = math.inf
        self._was_clipped = False

    def backward_begins(self, forward_order: Callable[[], Sequence[Unit]]) -> None:
        """The first gradient of a backward is there; `forward_order` tells the units in that of the next forward."""
        # Updates that no forward waited for read the gradients that this backward is about to change.
        self._queue.wait_for_steps()
        self._backwards.begin()
        if self._mode.goes_ahead and self._backwards.is_last_expected():
            self._ahead.begin(forward_order())
        else:
            self._ahead.end()

    def backward_raised(self) -> None:
        """There will be no step of its gradients."""
        self._ahead.end()

    def gradients_are_unscaled(self, factor: float) -> None:
        """A scaler multiplies the gradients of the step."""
        self._unscale_factor = factor

    def gradients_are_clipped(self, factor: float, max_norm: float) -> None:
        """The gradients of the step are clipped by `max_norm`."""
        self._was_clipped |= factor != 1.0
        self._max_norm = min(self._max_norm, max_norm)

    @property
    def hides(self) -> bool:
        """Whether the next update goes on behind the training thread."""
        return self._mode.hides

    def run_now(self, planned: Sequence[FlatUpdate]) -> list[FlatUpdate]:
        """Run what is not to be hidden, and return the rest.

        Raises
        ------
        TierIOError
            If a state could not be read or written.
        """
        hides = self.hides
        now = [update for update in planned if update.needs_device or not hides]
        # Hidden updates follow the forward; others go there and back: what was updated last is in the ring still.
        self._ring.goes_round = hides
        if not hides:
            self._queue.drop_ahead()
        if now:
            backwards = not hides and self._num_steps % 2 == 1
            self._queue.run(reversed(now) if backwards else now, backwards=backwards)
            accelerator = self._parts.accelerator
            copied = accelerator.record(accelerator.copy_in)
            self._parts.waits.order(Wait.STATE_COPY, accelerator.compute, copied)
        done = set(now)
        return [update for update in planned if update not in done]

    def hide(self, updates: Sequence[FlatUpdate], forward_order: Callable[[], Sequence[Unit]]) -> Jobs:
        """Let updates go on behind the training thread; what can be waited for until they are home."""
        self._ahead.end()
        left = self._queue.take_ahead(updates)
        if left:
            self._queue.begin(left, urgencies(forward_order()))
        return self._queue.under_way()

    def step_is_over(self, *, was_skipped: bool = False) -> None:
        """`optimizer.step()` is decided; what it was like is what is expected of the next."""
        if was_skipped:
            self._queue.drop_ahead()
        else:
            self._num_steps += 1
            self._mode.stepped(clipped=self._was_clipped)
        self._ahead.expected_factor, self._unscale_factor = self._unscale_factor, 1.0
        self._ahead.expected_max_norm, self._max_norm = self._max_norm, math.inf
        self._was_clipped = False
        self._backwards.updated()
