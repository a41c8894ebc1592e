"""Each rule is torch's optimizer (Lion: the paper's formula), up to roundings that are counted.

[Note: the bound]
All parameters and gradients are positive, and so are all terms of the moments' sums: nothing cancels, so each of the k
roundings of a step makes a value off by a factor of at most 1 + 2^-24, scalars included, and the relative errors add up
(Higham, "Accuracy and Stability of Numerical Algorithms", lemma 3.1). A parameter changes by a difference: its error is
at most gamma(k) of the sum of the terms, the parameter itself and all changes so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zerooffload.optim.rules import RULES
from zerooffload.optim.rules.rule import step_scalars

NUMEL = 257
NUM_STEPS = 6
ROUNDINGS_OF_A_STEP = 20
"""More than any rule has, on the way from a gradient to a parameter."""

COMMON = {"lr": 1e-2, "maximize": False}
GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    ("adamw", {"betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.0}),
    ("adam", {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    ("adagrad", {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.3, "eps": 1e-10}),
    ("adagrad", {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}),
    ("lion", {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False}),
    ("sgd", {"momentum": 0.0, "dampening": 0.5, "weight_decay": 0.0, "nesterov": False}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": False}),
    ("sgd", {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True}),
]


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, as it stands there."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                m = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = torch.sign(beta1 * m + (1 - beta1) * grad) + group["weight_decay"] * param
                param.sub_(group["lr"] * update)
                m.copy_(beta2 * m + (1 - beta2) * grad)


def paper_lion(params: Any, **options: Any) -> torch.optim.Optimizer:
    return PaperLion(params, options)


EXACT: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "lion": paper_lion,
    "sgd": torch.optim.SGD,
}


def positive(seed: int) -> torch.Tensor:
    return torch.rand(NUMEL, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize(("name", "options"), GROUPS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("maximize", [False, True])
def test_within_the_roundings_of_torchs_optimizer_in_float64(
    name: str, options: dict[str, Any], *, maximize: bool
) -> None:
    if maximize and options["weight_decay"] and name in {"adam", "adagrad", "sgd"}:
        pytest.skip("the decay has the other sign than the gradient: sums cancel, and the bound does not hold")
    group = {**COMMON, **options, "maximize": maximize}
    rule = RULES[name]
    exact = positive(0).double().requires_grad_()
    optimizer = EXACT[name]([exact], **group)
    param, moments = positive(0), [torch.zeros(NUMEL) for _ in rule.moments]
    terms = param.double()
    for step in range(1, NUM_STEPS + 1):
        grad = positive(step)
        before = exact.detach().clone()
        exact.grad = grad.double()
        optimizer.step()
        terms = terms + (exact.detach() - before).abs()
        scalars = step_scalars(rule, group, step, 1.0)
        rule.step(param, moments, grad, scalars.values)
        k = ROUNDINGS_OF_A_STEP * step
        gamma = k * 2.0**-24 / (1 - k * 2.0**-24)
        assert bool(((param.double() - exact.detach()).abs() <= gamma * terms).all()), step
    for moment, value in zip(rule.moments, moments, strict=True):
        state = optimizer.state[exact].get(moment.name)
        if state is not None:
            assert bool(((value.double() - state).abs() <= gamma * state.abs()).all()), moment.name


def test_every_rule_has_its_native_kernel() -> None:
    native = pytest.importorskip("zerooffload._native")
    assert {rule.name for rule in native.Rule} == set(RULES)
