"""Clipping by the exact norm, on every home of the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.runtime.clipping import clip_factor

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


@pytest.fixture(params=["host", "nvme", "device"])
def trained(
    request: pytest.FixtureRequest, offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> tuple[nn.Module, nn.Module]:
    """The same gradients twice: offloaded, and plain."""
    model, plain = offload(make_net(), "nvme", gradients=request.param), make_net()
    for net in (model, plain):
        net(tokens).backward()
        net(tokens * 2).backward()
    return model, plain


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    with zo.full_params(model, grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def exact_norm(plain: nn.Module, norm_type: float) -> float:
    values = [abs(value) for param in plain.parameters() for value in param.grad.double().reshape(-1).tolist()]
    if math.isinf(norm_type):
        return max(values)
    return math.fsum(value**norm_type for value in values) ** (1 / norm_type)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_the_norm_is_that_of_double_arithmetic_rounded_once(
    trained: tuple[nn.Module, nn.Module], norm_type: float
) -> None:
    model, plain = trained
    norm = zo.clip_grad_norm_(model, 1e9, norm_type)
    assert norm.dtype is torch.float32
    assert norm.ndim == 0
    assert float(norm) == pytest.approx(exact_norm(plain, norm_type), rel=2**-23)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_are_scaled_as_by_torch(trained: tuple[nn.Module, nn.Module], norm_type: float) -> None:
    model, plain = trained
    norm = zo.clip_grad_norm_(model, 0.01, norm_type)
    theirs = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    assert float(norm) == pytest.approx(float(theirs), rel=1e-6)
    clipped = gradients(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(clipped[name], param.grad, rtol=1e-6, atol=0)


def test_gradients_under_the_bound_keep_their_bits(trained: tuple[nn.Module, nn.Module]) -> None:
    model, plain = trained
    zo.clip_grad_norm_(model, 1e9)
    clipped = gradients(model)
    assert all(torch.equal(clipped[name], param.grad) for name, param in plain.named_parameters())


def test_some_parameters_are_normed_and_clipped_alone(trained: tuple[nn.Module, nn.Module]) -> None:
    model, plain = trained
    chosen = [model.layers[0][0].weight, model.head.bias]
    norm = zo.clip_grad_norm_(chosen, 1e-3)
    theirs = nn.utils.clip_grad_norm_([plain.layers[0][0].weight, plain.head.bias], 1e-3)
    assert float(norm) == pytest.approx(float(theirs), rel=1e-6)
    clipped = gradients(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(clipped[name], param.grad, rtol=1e-6, atol=0)
    assert float(zo.clip_grad_norm_(model.head.weight, 1e9)) == pytest.approx(
        float(plain.head.weight.grad.norm()), rel=1e-6
    )


def test_clipping_again_sees_what_clipping_made(trained: tuple[nn.Module, nn.Module]) -> None:
    model, plain = trained
    zo.clip_grad_norm_(model, 0.02)
    assert float(zo.clip_grad_norm_(model, 0.01)) == pytest.approx(0.02, rel=1e-3)
    for bound in (0.02, 0.01):
        nn.utils.clip_grad_norm_(plain.parameters(), bound)
    clipped = gradients(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(clipped[name], param.grad, rtol=1e-6, atol=0)


def test_a_backward_after_clipping_adds_to_clipped_gradients(
    trained: tuple[nn.Module, nn.Module], tokens: torch.Tensor
) -> None:
    model, plain = trained
    zo.clip_grad_norm_(model, 0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    for net in trained:
        net(tokens).backward()
    added = gradients(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(added[name], param.grad, rtol=1e-5, atol=1e-8)
    assert float(zo.clip_grad_norm_(model, 1e9)) == pytest.approx(exact_norm(plain, 2.0), rel=1e-6)


def test_the_step_uses_the_clipped_gradients(trained: tuple[nn.Module, nn.Module]) -> None:
    model, plain = trained
    ours, theirs = zo.AdamW(model.parameters(), lr=0.1, eps=1.0), torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1.0)
    zo.clip_grad_norm_(model, 0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    ours.step()
    theirs.step()
    with zo.full_params(model):
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_an_error_if_asked_and_changes_nothing_then(
    trained: tuple[nn.Module, nn.Module], bad: float
) -> None:
    model, plain = trained
    with zo.full_params(model, grads=True):
        model.head.bias.grad.fill_(bad)
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
        zo.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    left = gradients(model)
    for name, param in plain.named_parameters():
        assert name == "head.bias" or torch.equal(left[name], param.grad)
    assert not zo.clip_grad_norm_(model, 1.0).isfinite()


def test_a_nan_norm_makes_all_gradients_nan_as_in_torch() -> None:
    assert math.isnan(clip_factor(math.nan, 1.0))


@pytest.mark.parametrize(("norm", "factor"), [(0.0, 1.0), (0.5, 1.0), (math.inf, 0.0), (4.0, 0.25)])
def test_the_factor_is_torchs_and_an_fp32_value(norm: float, factor: float) -> None:
    got = clip_factor(norm, 1.0)
    assert got == pytest.approx(factor, rel=1e-6)
    assert got == float(np.float32(got))


def test_parameters_without_gradient_count_nothing(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme")
    assert float(zo.clip_grad_norm_(model, 1.0)) == 0.0
    assert float(zo.clip_grad_norm_([], 1.0)) == 0.0
    model(tokens).backward()
    for param in model.parameters():
        if param is not model.head.weight:
            param.grad = None
    with zo.full_params(model.head, grads=True):
        expected = float(model.head.weight.grad.norm())
    assert float(zo.clip_grad_norm_(model, 1e9)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_discarded_gradients_count_nothing(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str
) -> None:
    model = offload(make_net(), "nvme", gradients=tier)
    model(tokens).backward()
    zo.clip_grad_norm_(model, 1e9)
    zo.AdamW([model.layers[0][0].weight]).zero_grad()
    norm = float(zo.clip_grad_norm_(model, 1e9))
    expected = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients(model).values()))
    assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("norm_type", [0.0, -1.0])
def test_a_norm_of_no_sense_is_refused(trained: tuple[nn.Module, nn.Module], norm_type: float) -> None:
    with pytest.raises(zo.ConfigError, match="norm_type"):
        zo.clip_grad_norm_(trained[0], 1.0, norm_type)


def test_strangers_are_refused(offload: Offload, make_net: MakeNet, trained: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(zo.ConfigError, match="not offloaded"):
        zo.clip_grad_norm_(trained[1], 1.0)
    mixed = [trained[0].head.weight, trained[1].head.weight]
    with pytest.raises(zo.ConfigError, match=r"got a parameter of shape \(1, 16\)"):
        zo.clip_grad_norm_(mixed, 1.0)
    with pytest.raises(zo.ConfigError, match=r"got a parameter of shape \(1, 16\)"):
        zo.clip_grad_norm_([trained[0].head.weight, offload(make_net()).head.weight], 1.0)
