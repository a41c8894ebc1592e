"""What happens at each moment of a step: who must be full, what is fetched ahead, when gradients are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerooffload.runtime.access_order import AccessOrder, Pass
from zerooffload.runtime.gradients import GradientPath
from zerooffload.runtime.hook_points import HookPoint, at_end_of_backward, in_backward
from zerooffload.runtime.residency import Residency
from zerooffload.sharding.state import Phase
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat
from zerooffload.telemetry import Recorder


@dataclass(frozen=True)
class Owner:
    """Who is told of the moments of a step.

    Attributes
    ----------
    check : callable
        Raises if the run can no longer be used.
    training_begins : callable
        A forward of the whole model begins that may be trained on.
    backward_begins : callable
        The first gradient of a backward is there; given what tells the units in the order of the next training forward.
    backward_raised : callable
        Its gradients are those of a part of the model.
    """

    check: Callable[[], None]
    training_begins: Callable[[], None]
    backward_begins: Callable[[Callable[[], Sequence[Unit]]], None]
    backward_raised: Callable[[], None]


class Schedule:
    """The moments of a run's hook points; see `Moments`.

    Parameters
    ----------
    points : Sequence[HookPoint]
        In the order of the model, the root last.
    recorder : Recorder
        Told when the model computes, and for which point.
    """

    def __init__(
        self,
        points: Sequence[HookPoint],
        residency: Residency,
        gradients: GradientPath,
        owner: Owner,
        *,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._points = {point.name: point for point in points}
        self._root = points[-1]
        self._residency = residency
        self._gradients = gradients
        self._owner = owner
        self._order = AccessOrder([point.name for point in points if not point.stands_by])
        self._backward_is_open = False
        self._awaited: dict[int, int] = {}
        # The innermost last: calls whose forward, or whose backward, is under way.
        self._under_way: list[HookPoint] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a call of a hook point is, in forward or in backward."""
        return bool(self._under_way)

    def pre_forward(self, point: HookPoint) -> None:
        """Make the point's units full and fetch ahead."""
        self._recorder.compute_pauses()
        self._owner.check()
        nested_in_backward = in_backward()
        if not nested_in_backward:
            self.recover()
            if point is self._root:
                self._forget_interrupted_forward()
                if torch.is_grad_enabled():
                    self._owner.training_begins()
            if point is self._root or self._order.current is None:
                self._order.begin(Pass.TRAIN_FORWARD if torch.is_grad_enabled() else Pass.EVALUATION)
        point.num_forward_calls += 1
        self._under_way.append(point)
        if point.phase.current is Phase.IDLE:
            point.phase.to(Phase.FORWARD)
        self._use(point)
        self._recorder.compute_begins("recompute" if nested_in_backward else "forward", point.name)

    def post_forward(self, point: HookPoint) -> None:
        """Its units may go."""
        if not point.num_forward_calls:
            # Its pre-forward raised: nothing was taken.
            return
        point.num_forward_calls -= 1
        self._leave(point)
        if point.phase.current is Phase.FORWARD and not point.num_forward_calls:
            point.phase.to(Phase.IDLE)
        if point is self._root and not in_backward():
            self._order.end()
        self._recorder.compute_ends(point.name)

    def pre_backward(self, point: HookPoint) -> None:
        """Make the point's units full, and their gradients fit to be accumulated into."""
        self._recorder.compute_pauses()
        self._owner.check()
        self._open_backward()
        point.num_backward_calls += 1
        self._under_way.append(point)
        if point.phase.current is not Phase.PRE_BACKWARD:
            point.phase.to(Phase.PRE_BACKWARD)
        for unit in point.units:
            self._await_gradients(unit)
        self._use(point)
        self._recorder.compute_begins("backward", point.name)

    def post_backward(self, point: HookPoint) -> None:
        """One call of the point needs its parameters no more."""
        if not point.num_backward_calls:
            return
        point.num_backward_calls -= 1
        self._leave(point)
        if not point.num_backward_calls:
            point.phase.to(Phase.POST_BACKWARD)
        self._recorder.compute_ends(point.name)

    def values_are_wanted(self, unit: Unit) -> bool:
        """Values of a unit are used that no call under way is known to need: the innermost one needs them from now on.

        False if there is none.
        """
        if not self._under_way:
            return False
        point = self._under_way[-1]
        # Before, so that whatever becomes of it each call that is under way releases what it has required.
        point.units = (*point.units, unit)
        for _ in range(self._under_way.count(point)):
            self._residency.require([unit])
        return True

    def gradient_coming(self) -> None:
        """Autograd is about to add to a parameter's `grad`."""
        self._open_backward()

    def gradient_arrived(self, unit: Unit, part: UnitFlat, training: TrainingStates, index: int) -> None:
        """Autograd has finished a parameter's gradient."""
        self._gradients.arrived(part, training, index)
        left = self._awaited.get(id(unit), 0) - 1
        self._awaited[id(unit)] = left
        if left == 0:
            for point in self._points.values():
                if point.units == (unit,) and point.ends_with_its_gradients and point.num_backward_calls == 1:
                    self.post_backward(point)

    def end_backward(self) -> None:
        """The backward is over: nothing is read any more, all gradients have come."""
        # If this raises, the backward stays open, and `recover` closes it like one that raised itself.
        self._gradients.end_backward()
        self._close_backward()
        self._order.end()

    def forward_order(self) -> list[Unit]:
        """The units in the order of their first use in the training forward that is expected."""
        names = self._order.of(Pass.TRAIN_FORWARD)
        units = dict.fromkeys(unit for name in names for unit in self._points[name].units)
        others = (unit for point in self._points.values() for unit in point.units)
        return [*units, *(unit for unit in dict.fromkeys(others) if unit not in units)]

    def _leave(self, point: HookPoint) -> None:
        """A call of it, in forward or in backward, is under way no more."""
        position = max(number for number, other in enumerate(self._under_way) if other is point)
        del self._under_way[position]
        self._residency.release(point.units)

    def _use(self, point: HookPoint) -> None:
        self._order.use(point.name)
        upcoming = [unit for name in self._order.upcoming() for unit in self._points[name].units]
        self._residency.require(point.units, upcoming)
        self._residency.prefetch(upcoming)

    def _await_gradients(self, unit: Unit) -> None:
        if id(unit) not in self._awaited:
            self._awaited[id(unit)] = sum(len(part.flat.params) for part in unit.parts if part.training is not None)

    def _open_backward(self) -> None:
        if self._backward_is_open:
            return
        self._backward_is_open = True
        self._order.begin(Pass.BACKWARD)
        at_end_of_backward(self.end_backward)
        self._gradients.settle()
        self._owner.backward_begins(self.forward_order)
        self._gradients.begin()

    def _close_backward(self) -> None:
        self._backward_is_open = False
        self._awaited.clear()
        for point in self._points.values():
            while point.num_backward_calls:
                self.post_backward(point)
            if point.phase.current is Phase.POST_BACKWARD:
                point.phase.to(Phase.IDLE)

    def recover(self) -> None:
        """Close a backward that raised, and so never said that it was over.

        Raises
        ------
        ConfigError
            While gradients of a part of the model are left of it.
        """
        if in_backward():
            return
        if self._backward_is_open:
            self._close_backward()
            self._gradients.abandon_backward()
            self._owner.backward_raised()
        self._gradients.check_whole()

    def _forget_interrupted_forward(self) -> None:
        """End calls that did not: for Ctrl-C torch calls no hook."""
        for point in self._points.values():
            while point.num_forward_calls:
                self.post_forward(point)
            point.forget_inputs()
