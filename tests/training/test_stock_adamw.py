"""Stock `torch.optim.AdamW` and `clip_grad_norm_` stay within a derived bound, step by step and element by element.

Offloaded training equals the reference to the bit (test_tiers_equal.py); here the reference is held against torch's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.reference_optimizer import ReferenceOptimizer
from support.reference_training import Recipe, reference_norm
from support.rounding_bound import RoundingBound, Step, clip_factor, gamma, norm_difference
from support.small_models import MODELS, batch
from torch import nn

from zerooffload.optim.record import OptimizerStates

MAX_NORM = 1.3
STEP: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
NUM_STEPS = 20


class Pair:
    """The same model twice: one with the reference optimizer, one with torch's."""

    def __init__(self, recipe: Recipe, reference: dict[str, Any], stock: dict[str, Any]) -> None:
        self.ours, self.theirs = recipe.build(), recipe.build()
        self.recipe = recipe
        self.reference = ReferenceOptimizer(self.ours.parameters(), OptimizerStates(), **reference)
        self.stock = torch.optim.AdamW(self.theirs.parameters(), foreach=False, fused=False, **stock)
        self.bounds = [RoundingBound(param) for param in self.ours.parameters()]

    def params(self) -> list[tuple[nn.Parameter, nn.Parameter, RoundingBound]]:
        return list(zip(self.ours.parameters(), self.theirs.parameters(), self.bounds, strict=True))

    def step(self, number: int) -> None:
        """Train both for a step and propagate the bounds. `number` counts from 1."""
        for micro_step in range(2):
            tokens = batch(number, micro_step)
            for model in (self.ours, self.theirs):
                (self.recipe.loss(model, tokens) / 2).backward()
        grads = [
            (ours.grad.double(), (ours.grad.double() - theirs.grad.double()).abs()) for ours, theirs, _ in self.params()
        ]
        before = [self.values(ours) for ours, _, _ in self.params()]
        factor = self.clip(math.sqrt(sum(float(difference.square().sum()) for _, difference in grads)))
        self.reference.step()
        self.stock.step()
        step = Step(
            learning_rate=STEP["lr"],
            betas=STEP["betas"],
            eps=STEP["eps"],
            weight_decay=STEP["weight_decay"],
            number=number,
        )
        for (_, _, bound), values, grad in zip(self.params(), before, grads, strict=True):
            bound.step(values, grad, factor, step)
        self.reference.zero_grad()
        self.stock.zero_grad()

    def clip(self, grad_difference: float) -> tuple[float, float]:
        """Clip both. Returns our factor, and a bound on the difference to theirs."""
        ours = reference_norm(self.ours)
        theirs = float(nn.utils.clip_grad_norm_(self.theirs.parameters(), MAX_NORM))
        numel = sum(param.numel() for param in self.ours.parameters())
        assert abs(ours - theirs) <= norm_difference(ours, grad_difference, numel)
        exact = clip_factor(ours, MAX_NORM)
        self.reference.grad_factor = float(np.float32(exact))
        return exact, abs(exact - clip_factor(theirs, MAX_NORM)) + 2 * gamma(4)

    def values(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        moments = {name: self.reference.moment(param, name).double().view(param.shape) for name in names}
        return {"param": param.detach().double(), **moments}

    def excess(self) -> float:
        """The largest ratio of a difference to its bound."""
        return max(
            float(((ours.detach().double() - theirs.detach().double()).abs() / bound.param).max())
            for ours, theirs, bound in self.params()
        )


@pytest.mark.parametrize("model", MODELS)
def test_within_the_bound(model: str) -> None:
    pair = Pair(Recipe(build=MODELS[model]), STEP, STEP)
    for number in range(1, NUM_STEPS + 1):
        pair.step(number)
        assert pair.excess() <= 1.0, f"step {number}"
    medians = [float(bound.param.median()) for _, _, bound in pair.params()]
    # The bound says something: it is far below what one step changes.
    assert sorted(medians)[len(medians) // 2] < STEP["lr"] / 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 3e-3 * (1 + 1e-4)),
        ("betas", (0.9001, 0.99)),
        ("betas", (0.9, 0.9901)),
        ("weight_decay", 0.1003),
        ("eps", 2e-8),
    ],
)
def test_the_bound_finds_a_slightly_wrong_optimizer(name: str, value: Any) -> None:
    pair = Pair(Recipe(build=MODELS["llama"]), {**STEP, name: value}, STEP)
    worst = 0.0
    for number in range(1, 5):
        pair.step(number)
        worst = max(worst, pair.excess())
    assert worst > 1.0
