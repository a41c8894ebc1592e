"""A step's scalars: exact arithmetic, rounded once to fp32; and its seed."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.optim.rules import RULES
from zerooffload.optim.rules.rule import step_scalars

GROUP: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "maximize": False,
    "lr_decay": 0.01,
    "initial_accumulator_value": 0.1,
    "momentum": 0.9,
    "dampening": 0.25,
    "nesterov": False,
}
"""Hyperparameters of every rule."""

needs_extended = pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 2.0**-60, reason="long double has no more digits than double here"
)


def values_of(algorithm: str, step: int = 1, grad_factor: float = 1.0, **changes: Any) -> tuple[float, ...]:
    return step_scalars(RULES[algorithm], {**GROUP, **changes}, step, grad_factor).values


def fp32(value: float) -> float:
    return float(np.float32(value))


def within_one_rounding(got: float, exact: Fraction) -> bool:
    """Half a unit of fp32, and a little, since the formula was computed in double."""
    error = abs(Fraction(got) - exact)
    return error <= abs(exact) * Fraction(1, 1 << 24) * (1 + Fraction(1, 1 << 20)) + Fraction(1, 1 << 150)


hyperparameters = st.fixed_dictionaries(
    {
        "lr": st.floats(0, 1),
        "betas": st.tuples(st.floats(0, 0.9999), st.floats(0, 0.99999)),
        "eps": st.floats(0, 1e-3),
        "weight_decay": st.floats(0, 0.5),
        "lr_decay": st.floats(0, 1),
        "initial_accumulator_value": st.floats(0, 1),
        "momentum": st.floats(0, 0.999),
        "dampening": st.floats(0, 0.999),
    }
)


@given(hyperparameters, st.integers(1, 300), st.floats(0, 4))
def test_every_scalar_is_the_exact_value_within_one_rounding(
    group: dict[str, Any], step: int, grad_factor: float
) -> None:
    exact = {name: Fraction(value) for name, value in group.items() if name != "betas"}
    lr, one = exact["lr"], Fraction(1)
    beta1, beta2 = map(Fraction, group["betas"])
    decay = one - lr * exact["weight_decay"]
    adam = [beta1, one - beta1, beta2, one - beta2, None, exact["eps"], lr / (one - beta1**step)]
    first = step == 1
    expected = {
        "adamw": [decay, *adam],
        "adam": [exact["weight_decay"], *adam],
        "adagrad": [
            exact["weight_decay"],
            exact["initial_accumulator_value"] if first else Fraction(0),
            exact["eps"],
            lr / (one + (step - 1) * exact["lr_decay"]),
        ],
        "lion": [decay, beta1, one - beta1, beta2, one - beta2, lr],
        "sgd": [
            exact["weight_decay"],
            exact["momentum"],
            one if first or not group["momentum"] else one - exact["dampening"],
            Fraction(0),
            one,
            lr,
        ],
    }
    for algorithm, rest in expected.items():
        got = values_of(algorithm, step, grad_factor, **group)
        assert len(got) == 1 + len(rest)
        for number, (scalar, value) in enumerate(zip(got, [Fraction(grad_factor), *rest], strict=True)):
            if value is None:  # 1 / sqrt(1 - beta2^t), by its square
                assert abs(Fraction(scalar) ** 2 * (one - beta2**step) - 1) <= Fraction(1, 1 << 22)
            else:
                assert within_one_rounding(scalar, value), (algorithm, number)


@needs_extended
@pytest.mark.parametrize("algorithm", ["adamw", "adam"])
@pytest.mark.parametrize("step", [1, 2, 1000, 10**6, 10**7])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.99, 0.9999), (0.0, 0.99999), (0.999999, 0.9999999)])
def test_bias_correction_is_that_of_exact_arithmetic(algorithm: str, step: int, betas: tuple[float, float]) -> None:
    """In long double, as -expm1(t log1p(beta - 1)): beta - 1 is exact, and no digits cancel."""
    *_, root_factor, _, step_size = values_of(algorithm, step, betas=betas)
    biases = [-np.expm1(step * np.log1p(np.longdouble(beta) - 1)) if beta else np.longdouble(1) for beta in betas]
    for got, exact in ((root_factor, 1 / np.sqrt(biases[1])), (step_size, np.longdouble(1e-3) / biases[0])):
        # Half a unit of fp32 is at most 2^-24 of the value; double's own roundings are far below.
        assert abs(np.longdouble(got) - exact) <= exact * np.longdouble(2.0) ** -24 * (1 + 2.0**-10), (got, exact)


def test_late_steps_have_no_bias_left() -> None:
    for algorithm in ("adamw", "adam"):
        *_, root_factor, _, step_size = values_of(algorithm, 10**6)
        assert root_factor == 1.0
        assert step_size == fp32(1e-3)


@pytest.mark.parametrize("algorithm", RULES)
@given(lr=st.floats(1e-6, 1), step=st.integers(1, 10**7))
def test_every_scalar_is_an_fp32_value(algorithm: str, lr: float, step: int) -> None:
    assert all(value == fp32(value) for value in values_of(algorithm, step, 1 / 3, lr=lr))


def test_the_first_step_of_adamws_defaults_is_known() -> None:
    expected = (1.0, 1 - 1e-5, 0.9, 1 - 0.9, 0.999, 1 - 0.999, (1 - 0.999) ** -0.5, 1e-8, 1e-3 / (1 - 0.9))
    assert values_of("adamw") == tuple(map(fp32, expected))


def test_sgd_knows_its_first_step_and_nesterov() -> None:
    assert values_of("sgd", 1)[2:] == tuple(map(fp32, (0.9, 1.0, 0.0, 1.0, 1e-3)))
    assert values_of("sgd", 2)[2:] == tuple(map(fp32, (0.9, 0.75, 0.0, 1.0, 1e-3)))
    assert values_of("sgd", 2, nesterov=True, dampening=0.0)[2:] == tuple(map(fp32, (0.9, 1.0, 1.0, 0.9, 1e-3)))
    assert values_of("sgd", 2, momentum=0.0)[2:4] == (0.0, 1.0)


def test_adagrad_starts_its_sum_once_and_decays_its_rate() -> None:
    assert values_of("adagrad", 1)[2:] == tuple(map(fp32, (0.1, 1e-8, 1e-3)))
    assert values_of("adagrad", 101)[2:] == tuple(map(fp32, (0.0, 1e-8, 1e-3 / 2)))


@pytest.mark.parametrize("algorithm", RULES)
def test_maximizing_turns_the_gradient_around_and_nothing_else(algorithm: str) -> None:
    factor, *rest = values_of(algorithm, 3, 0.25, maximize=True)
    assert factor == -0.25
    assert [0.25, *rest] == list(values_of(algorithm, 3, 0.25))


@pytest.mark.parametrize("algorithm", RULES)
def test_a_rate_may_be_a_tensor(algorithm: str) -> None:
    torch = pytest.importorskip("torch")
    assert values_of(algorithm, 3, lr=torch.tensor(0.5)) == values_of(algorithm, 3, lr=0.5)


def test_seeds_are_32_bits_and_those_of_neighbouring_steps_are_unrelated() -> None:
    """A bijection, so no two steps share one; neighbours differ in half of their bits, within 5 standard errors."""
    steps = [*range(1, 4097), 10**6, 10**7, 2**32 - 1]
    seeds = [step_scalars(RULES["lion"], GROUP, step, 1.0).seed for step in steps]
    assert all(0 <= seed < 1 << 32 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    flips = [(one ^ other).bit_count() for one, other in itertools.pairwise(seeds[:4096])]
    assert abs(np.mean(flips) - 16) < 5 * math.sqrt(8 / 4095)
