from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.optim.scalars import AdamWScalars, AdamWSettings


def settings(**changes: object) -> AdamWSettings:
    defaults = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "maximize": False,
        "grad_factor": 1.0,
        "step": 1,
    }
    return AdamWSettings(**{**defaults, **changes})  # type: ignore[arg-type]


@given(
    st.floats(0, 1),
    st.floats(0, 0.9999),
    st.floats(0, 0.99999),
    st.floats(0, 1e-3),
    st.floats(0, 0.5),
    st.integers(1, 5000),
)
def test_every_factor_is_the_exact_value_within_one_rounding_to_fp32(  # noqa: PLR0917 - hypothesis gives them so
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> None:
    scalars = settings(lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, step=step).scalars()
    one, power = Fraction(1), {beta: Fraction(beta) ** min(step, 400) for beta in (beta1, beta2)}
    exact = {
        "decay": one - Fraction(lr) * Fraction(weight_decay),
        "beta1": Fraction(beta1),
        "one_minus_beta1": one - Fraction(beta1),
        "beta2": Fraction(beta2),
        "one_minus_beta2": one - Fraction(beta2),
        "eps": Fraction(eps),
    }
    if step <= 400:
        exact["step_size"] = Fraction(lr) / (one - power[beta1])
        assert scalars.bias2_sqrt**2 == pytest.approx(float(one - power[beta2]), rel=3e-7)
    for name, value in exact.items():
        assert getattr(scalars, name) == pytest.approx(float(value), rel=2**-23, abs=1e-45), name


@given(st.floats(1e-6, 1), st.integers(1, 10_000))
def test_every_factor_is_an_fp32_value(lr: float, step: int) -> None:
    scalars = settings(lr=lr, step=step, grad_factor=1 / 3).scalars()
    assert all(value == float(np.float32(value)) for value in vars(scalars).values())


def test_the_first_step_of_the_defaults_is_known() -> None:
    expected = AdamWScalars(
        grad_factor=1.0,
        decay=float(np.float32(1 - 1e-5)),
        beta1=float(np.float32(0.9)),
        one_minus_beta1=float(np.float32(1 - 0.9)),
        beta2=float(np.float32(0.999)),
        one_minus_beta2=float(np.float32(1 - 0.999)),
        bias2_sqrt=float(np.float32((1 - 0.999) ** 0.5)),
        eps=float(np.float32(1e-8)),
        step_size=float(np.float32(1e-3 / (1 - 0.9))),
    )
    assert settings().scalars() == expected


def test_maximizing_turns_the_gradient_around() -> None:
    assert settings(maximize=True, grad_factor=0.25).scalars().grad_factor == -0.25


def test_late_steps_have_no_bias_left() -> None:
    scalars = settings(step=1_000_000).scalars()
    assert scalars.bias2_sqrt == 1.0
    assert scalars.step_size == float(np.float32(1e-3))
