"""The hooks by which a parameter's gradients come from autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from zerooffload.errors import ConfigError, InternalError
from zerooffload.runtime.schedule import Schedule
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat


class _Hook:
    """Of a parameter.

    Autograd keeps hooks where the garbage collector does not look: one that held the run, which holds the parameter,
    would keep both for ever.
    """

    def __init__(self, schedule: Schedule, unit: Unit, part: UnitFlat, training: TrainingStates, index: int) -> None:
        self._schedule = weakref.ref(schedule)
        self._unit, self._part, self._training = weakref.ref(unit), weakref.ref(part), weakref.ref(training)
        self._index = index


class _Coming(_Hook):
    """Called with each gradient, before autograd adds it to others."""

    def __call__(self, _: torch.Tensor) -> None:
        schedule, part = self._schedule(), self._part()
        if schedule is None or part is None:
            return
        schedule.gradient_coming()
        if isinstance(part.flat.params[self._index].grad, OffloadedGradient):
            raise ConfigError(
                f"{part.flat.layout.slots[self._index].param.name} got two gradients in one backward, because"
                " reentrant checkpoints share it: use torch.utils.checkpoint with use_reentrant=False"
            )


class _Arrived(_Hook):
    """Called when autograd has finished a gradient. `is_seen`: hooks of the user's run before."""

    is_seen = False

    def __call__(self, _: torch.Tensor) -> None:
        schedule, unit, part, training = self._schedule(), self._unit(), self._part(), self._training()
        if schedule is None or unit is None or part is None or training is None:
            raise InternalError("a gradient arrived for a run that is gone")
        if self.is_seen and training.held[self._index]:
            raise ConfigError(
                f"{part.flat.layout.slots[self._index].param.name} has a post-accumulate hook, which would see the"
                " gradient of the last backward, and not the sum of several: use param.register_hook, or read sums"
                " inside zo.full_params(module, grads=True)"
            )
        schedule.gradient_arrived(unit, part, training, self._index)


def hook_gradient(
    schedule: Schedule, unit: Unit, part: UnitFlat, training: TrainingStates, index: int
) -> list[RemovableHandle]:
    """Let a parameter's gradients go to the schedule."""
    param = part.flat.params[index]
    coming = _Coming(schedule, unit, part, training, index)
    arrived = _Arrived(schedule, unit, part, training, index)
    # The user's hooks that are there already run before ours, which takes the gradient away.
    arrived.is_seen = bool(param._post_accumulate_grad_hooks)
    return [param.register_hook(coming), param.register_post_accumulate_grad_hook(arrived)]


def users_gradient_hooks(param: torch.Tensor) -> list[Callable[..., object]]:
    """What the user registered with `param.register_hook`."""
    return [hook for hook in (param._backward_hooks or {}).values() if not isinstance(hook, _Coming)]
