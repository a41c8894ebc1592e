from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from zerooffload.runtime.hook_points import HookPoint, in_backward, own_views_of_inputs, tensors_in


class Moments:
    """Writes down what happens."""

    is_under_way = False

    def __init__(self) -> None:
        self.log: list[str] = []

    def pre_forward(self, point: HookPoint) -> None:
        self.log.append(f"{point.name} forward")
        point.num_forward_calls += 1
        if point.num_forward_calls == 1:
            point.phase.to(type(point.phase.current).FORWARD)

    def post_forward(self, point: HookPoint) -> None:
        self.log.append(f"{point.name} forward done")
        point.num_forward_calls -= 1
        if not point.num_forward_calls:
            point.phase.to(type(point.phase.current).IDLE)

    def pre_backward(self, point: HookPoint) -> None:
        assert in_backward()
        self.log.append(f"{point.name} backward")

    def post_backward(self, point: HookPoint) -> None:
        self.log.append(f"{point.name} backward done")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output:
    loss: Any
    extra: Any = None


T = [torch.full((1,), float(number)) for number in range(4)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (T[0], T[:1]),
        ([T[0], (T[1], {"a": T[2]}), "text", None], T[:3]),
        (OrderedDict(a=T[0], b=[T[1]]), T[:2]),
        (Output(T[0], Output([T[1], T[2]])), T[:3]),
        (Pair(T[0], 5), T[:1]),
        ("text", []),
        (None, []),
        (Output, []),
    ],
)
def test_tensors_are_found_in_containers_and_dataclasses(value: Any, expected: list[torch.Tensor]) -> None:
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_a_model_output_of_transformers_is_looked_into() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(loss=T[0], logits=T[1], hidden_states=(T[2],))
    assert [float(tensor) for tensor in tensors_in(output)] == [0.0, 1.0, 2.0]


def test_differentiable_inputs_become_views_of_their_own() -> None:
    tracked = torch.ones(2, requires_grad=True)
    parameter, plain = nn.Parameter(torch.ones(2)), torch.ones(2)
    args, kwargs, views = own_views_of_inputs((tracked, parameter, plain, 5), {"x": [tracked], "y": None})
    assert args[0] is not tracked
    assert args[0]._base is tracked
    assert kwargs["x"][0] is not args[0]
    assert [id(view) for view in views] == [id(args[0]), id(kwargs["x"][0])]
    assert args[1] is parameter
    assert args[2] is plain
    assert args[3] == 5
    assert kwargs["y"] is None


def test_without_gradients_inputs_are_left_as_they_are() -> None:
    tracked = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        args, kwargs, views = own_views_of_inputs((tracked,), {})
    assert args[0] is tracked
    assert (kwargs, views) == ({}, [])


@pytest.fixture
def chain() -> tuple[nn.Sequential, Moments]:
    model, moments = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Moments()
    for number, module in enumerate(model):
        HookPoint(str(number), module, ()).install(moments)
    return model, moments


def test_moments_come_in_the_order_of_forward_and_backward(chain: tuple[nn.Sequential, Moments]) -> None:
    model, moments = chain
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert moments.log == [
        "0 forward",
        "0 forward done",
        "1 forward",
        "1 forward done",
        "1 backward",
        "1 backward done",
        "0 backward",
        "0 backward done",
    ]


def test_a_forward_that_raises_is_done_too(chain: tuple[nn.Sequential, Moments]) -> None:
    model, moments = chain
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    assert moments.log == ["0 forward", "0 forward done"]


def test_without_gradients_there_is_no_backward_to_await(chain: tuple[nn.Sequential, Moments]) -> None:
    model, moments = chain
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert len(moments.log) == 4


def test_a_module_called_twice_begins_and_ends_each_call() -> None:
    module, moments = nn.Linear(2, 2), Moments()
    HookPoint("m", module, ()).install(moments)
    shared = torch.ones(1, 2, requires_grad=True)
    (module(shared) + module(shared)).sum().backward()
    assert moments.log[4:].count("m backward") == 2
    assert moments.log[4:].count("m backward done") == 2


def test_removed_hooks_are_silent() -> None:
    module, moments = nn.Linear(2, 2), Moments()
    for handle in HookPoint("m", module, ()).install(moments):
        handle.remove()
    module(torch.ones(1, 2)).sum().backward()
    assert moments.log == []


def test_outside_of_a_backward_we_are_not_in_one() -> None:
    assert not in_backward()
