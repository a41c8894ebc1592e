"""Modules at whose boundaries something happens, and the hooks that say when. Each hook is one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from zerooffload.sharding.state import PHASE_TRANSITIONS, Phase, StateMachine
from zerooffload.sharding.unit import Unit


class Moments(Protocol):
    """What happens at the boundaries of a hook point."""

    @property
    def is_under_way(self) -> bool:
        """Whether a call of some hook point is, in forward or in backward."""

    def pre_forward(self, point: HookPoint) -> None:
        """Its forward begins."""

    def post_forward(self, point: HookPoint) -> None:
        """Its forward has ended, or raised."""

    def pre_backward(self, point: HookPoint) -> None:
        """A gradient has reached an output of one of its calls."""

    def post_backward(self, point: HookPoint) -> None:
        """All gradients of the inputs of one of its calls are known: its parameters are not read any more for it."""


class HookPoint:
    """A module with hooks, and the units that its forward uses.

    Attributes
    ----------
    name : str
    units : tuple[Unit, ...]
    phase : StateMachine[Phase]
    stands_by : bool
        Nothing happens at its boundaries in a call of another point.
    num_backward_calls : int
        Calls of the module whose backward is under way.
    """

    def __init__(self, name: str, module: nn.Module, units: Iterable[Unit], *, stands_by: bool = False) -> None:
        self.name = name
        self.stands_by = stands_by
        self.module = module
        self.units = tuple(units)
        self.phase = StateMachine(f"hook point {name}", Phase.IDLE, PHASE_TRANSITIONS)
        self.num_backward_calls = 0
        self.num_forward_calls = 0
        self.ends_with_its_gradients = False
        # Of each call that is under way; None for one in which it stands by.
        self._inputs: list[list[torch.Tensor] | None] = []

    def install(self, moments: Moments) -> list[RemovableHandle]:
        """Put the hooks on the module. `torch.compile` runs them as they are, and compiles what is between."""
        before = torch.compiler.disable(lambda _, args, kwargs: self._before(moments, args, kwargs))
        after = torch.compiler.disable(lambda _module, _args, output: self._after(moments, output))
        return [
            self.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(after, always_call=True),
        ]

    def forget_inputs(self) -> None:
        """Drop what calls that never ended have left."""
        self._inputs.clear()

    def _before(self, moments: Moments, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.stands_by and moments.is_under_way:
            self._inputs.append(None)
            return args, kwargs
        moments.pre_forward(self)
        args, kwargs, inputs = own_views_of_inputs(args, kwargs)
        self._inputs.append(inputs)
        return args, kwargs

    def _after(self, moments: Moments, output: Any) -> None:
        inputs = self._inputs.pop() if self._inputs else []
        if inputs is None:
            return
        recomputing = self.phase.current is not Phase.FORWARD
        moments.post_forward(self)
        if recomputing or not torch.is_grad_enabled():
            return
        call = _Call(self, moments, len(inputs))
        self.ends_with_its_gradients = not inputs
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(call.output_gradient)
        for view in inputs:
            view.register_hook(call.input_gradient)


class _Call:
    """One call of a hook point, for its backward. Holds nothing of autograd's graph, which holds it."""

    def __init__(self, point: HookPoint, moments: Moments, num_inputs: int) -> None:
        self._point = point
        self._moments = moments
        self._num_inputs = num_inputs
        self._backward = -1
        self._inputs_left = 0

    def output_gradient(self, _: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._inputs_left = self._num_inputs
            self._moments.pre_backward(self._point)

    def input_gradient(self, _: torch.Tensor) -> None:
        self._inputs_left -= 1
        if not self._inputs_left:
            self._moments.post_backward(self._point)


def own_views_of_inputs(args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Arguments in which each differentiable tensor is a view of its own, and these views.

    [Note: own views of inputs]
    A tensor that several modules share (encoder states) gets its whole gradient only after all of them. A view made for
    one call gets that call's part, so "the inputs' gradients are known" means that this call's backward is over.
    """
    if not torch.is_grad_enabled():
        return args, kwargs, []
    views: list[torch.Tensor] = []

    def own_view(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or isinstance(leaf, nn.Parameter):
            return leaf
        view = leaf.view_as(leaf)
        views.append(view)
        return view

    return tree_map(own_view, args), tree_map(own_view, kwargs), views


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


Callback = Callable[[], None]


def at_end_of_backward(callback: Callback) -> None:
    """Let autograd call back when the backward that is under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether the calling thread is in a backward."""
    return torch._C._current_graph_task_id() != -1
