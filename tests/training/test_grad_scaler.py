"""fp16 with a loss scale: the bits of plain PyTorch, and skipped steps that change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.reference_optimizer import ReferenceOptimizer
from support.reference_training import Recipe, current_params, flat_layouts, offload_prepared, reference_norm
from support.small_models import MODELS, batch

import zerooffload as zo
from zerooffload.optim.record import OptimizerStates

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

RECIPE = Recipe(build=MODELS["llama"], compute_dtype="fp16")
NUM_STEPS = 8
SCALE = 2.0**12
# The third step overflows, so the scale halves; two good steps in a row double it.
LARGE_LOSS_STEP = 2
GROWTH_INTERVAL = 2


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    loss = RECIPE.loss(model, batch(step, 0))
    return loss * 2.0**14 if step == LARGE_LOSS_STEP else loss


def train_plain() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = RECIPE.build()
    optimizer = ReferenceOptimizer(model.parameters(), OptimizerStates(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer.take_over(model, "fp16", flat_layouts(model))
    scale, good = SCALE, 0
    scales, losses = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        (loss * scale).backward()
        losses.append(loss.item())
        norm = reference_norm(model) / scale
        if np.isfinite(norm):
            clip = float(np.float32(min(1.0, 1.0 / (norm + 1e-6))))
            optimizer.grad_factor = float(np.float32(1.0 / scale * clip))
            optimizer.step()
            good += 1
            scale, good = (scale * 2, 0) if good == GROWTH_INTERVAL else (scale, good)
        else:
            scale, good = scale / 2, 0
        optimizer.zero_grad()
        scales.append(scale)
    return losses, scales, {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    return train_plain()


@pytest.mark.parametrize("homes", [("host", "host", "host"), ("nvme", "nvme", "nvme")], ids="-".join)
@pytest.mark.usefixtures("small_chunks")
def test_the_bits_of_plain_pytorch(homes: tuple[str, str, str], nvme: Path, plain: Any) -> None:
    names = ("params", "optimizer", "gradients")
    model = offload_prepared(RECIPE, nvme_paths=[nvme], **dict(zip(names, homes, strict=True)))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    scaler = zo.GradScaler(init_scale=SCALE, growth_interval=GROWTH_INTERVAL)
    losses, scales = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.unscale_(optimizer)
        zo.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    params = current_params(model)
    zo.close(model)
    assert scales == plain[1]
    assert scales[LARGE_LOSS_STEP] < scales[LARGE_LOSS_STEP - 1]
    assert losses == plain[0]
    assert all(torch.equal(params[name], plain[2][name]) for name in params)


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_changes_nothing(tier: str, bad: float, nvme: Path) -> None:
    model = offload_prepared(RECIPE, params=tier, optimizer=tier, gradients=tier, nvme_paths=[nvme])
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    scaler = zo.GradScaler(init_scale=64.0)

    def state() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        return current_params(model), list(optimizer.state_dict()["state"].values())

    scaler.scale(RECIPE.loss(model, batch(0, 0))).backward()
    assert scaler.step(optimizer) is None
    scaler.update()
    optimizer.zero_grad()
    before = state()
    (RECIPE.loss(model, batch(1, 0)) * bad).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after = state()
    zo.close(model)
    assert scaler.get_scale() == 32.0
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    for one, other in zip(before[1], after[1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_torchs_scaler_meets_a_clear_error() -> None:
    model = offload_prepared(Recipe(build=MODELS["llama"]))
    optimizer = zo.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(RECIPE.loss(model, batch(0, 0))).backward()
    with pytest.raises(zo.ConfigError, match=r"zo\.GradScaler"):
        scaler.unscale_(optimizer)
    zo.close(model)


def test_it_takes_over_torchs_state_and_back() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    theirs.scale(torch.ones(()))
    ours = zo.GradScaler()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()


GOOD = zo.GradScaler(init_scale=8.0, growth_interval=3).state_dict()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": 0.0}, "scale=0.0 is out of range"),
        ({"scale": float("nan")}, "scale=nan is out of range"),
        ({"scale": 2.0**128}, "finite in fp32"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 is out of range"),
        ({"growth_factor": float("inf")}, "growth_factor=inf is out of range"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 is out of range"),
        ({"growth_interval": 0}, "growth_interval=0 is out of range"),
    ],
)
def test_a_state_out_of_range_changes_nothing(changed: dict[str, float], message: str) -> None:
    scaler = zo.GradScaler()
    before = scaler.state_dict()
    with pytest.raises(zo.ConfigError, match=message):
        scaler.load_state_dict({**GOOD, **changed})
    assert scaler.state_dict() == before
    scaler.load_state_dict(GOOD)
    assert scaler.state_dict() == GOOD


def test_what_is_no_state_of_a_scaler_is_told() -> None:
    with pytest.raises(zo.ConfigError, match="lacks backoff_factor, _growth_tracker"):
        zo.GradScaler().load_state_dict({"scale": 8.0, "growth_factor": 2.0, "growth_interval": 3})


def test_settings_out_of_range_are_told() -> None:
    for setting in ({"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}):
        with pytest.raises(zo.ConfigError, match=f"{next(iter(setting))}=.* is out of range"):
            zo.GradScaler(**setting)
    with pytest.raises(zo.ConfigError, match="new_scale=inf is out of range"):
        zo.GradScaler().update(float("inf"))


def test_the_scale_stays_within_fp32_as_torchs_does() -> None:
    model = torch.nn.Linear(2, 2)
    zo.offload(model, zo.OffloadConfig(threads=1))
    optimizer = zo.AdamW(model.parameters())
    scaler = zo.GradScaler(init_scale=2.0**126, growth_interval=1)
    scales = []
    for _ in range(3):
        # Scaled, it is finite in fp32 all the same.
        scaler.scale(model(torch.ones(1, 2)).sum() * 2.0**-120).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [2.0**127] * 3
    zo.close(model)


def test_disabled_it_is_not_there() -> None:
    model = torch.nn.Linear(2, 2)
    zo.offload(model, zo.OffloadConfig(threads=1))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    scaler = zo.GradScaler(enabled=False)
    loss = model(torch.ones(1, 2)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    before = model.state_dict()["weight"].clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.state_dict()["weight"])
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    zo.close(model)


def test_calls_out_of_order_are_errors() -> None:
    model = torch.nn.Linear(2, 2)
    zo.offload(model, zo.OffloadConfig(threads=1))
    optimizer = zo.AdamW(model.parameters())
    scaler = zo.GradScaler()
    with pytest.raises(zo.ConfigError, match="without a step"):
        scaler.update()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(zo.ConfigError, match="already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(zo.ConfigError, match="already"):
        scaler.step(optimizer)
    zo.close(model)
