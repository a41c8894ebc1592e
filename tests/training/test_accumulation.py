"""Gradients of several backwards: added up in fp32 where that is said, with the same bits on every tier."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.environments import COMBINATIONS, PAIRWISE, TIERS, Homes, least_memory, simulated
from support.reference_optimizer import ReferenceOptimizer
from support.reference_training import (
    Outcome,
    Recipe,
    current_params,
    differences,
    flat_layouts,
    offload_prepared,
    reference_norm,
    train_offloaded,
    train_plain,
)
from support.simulated_accelerator import Copies
from support.simulated_engine import Transfers
from support.small_models import batch, branching, half_used
from torch import nn

import zerooffload as zo
from zerooffload.optim.record import OptimizerStates
from zerooffload.sharding.registry import residence_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_chunks")

FOUR: dict[str, Any] = {"num_steps": 3, "num_micro_steps": 4, "accumulation_steps": 4}
LLAMA = {dtype: Recipe(compute_dtype=dtype, **FOUR) for dtype in ("bf16", "fp16")}
IN_BF16 = Recipe(compute_dtype="bf16", num_steps=3, num_micro_steps=4)
ANY_LOSS: dict[str, Any] = {"loss": lambda model, tokens: model(tokens), "compute_dtype": "bf16"}
PARTIAL = {
    "half of each unit": Recipe(build=half_used, **ANY_LOSS, **FOUR),
    "a unit, and parameters used twice": Recipe(build=branching, **ANY_LOSS, **FOUR),
    "never all of a unit": Recipe(build=half_used, **ANY_LOSS, **{**FOUR, "num_micro_steps": 1}),
    "bf16 moments": Recipe(build=half_used, moments="bf16", **ANY_LOSS, **FOUR),
    "8-bit moments": Recipe(build=half_used, moments="8bit", **ANY_LOSS, **FOUR),
}


@pytest.mark.parametrize("dtype", LLAMA)
@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_every_placement_has_the_bits_of_plain_fp32_sums(
    homes: Homes, dtype: str, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    outcome = train_offloaded(LLAMA[dtype], **placed(homes, nvme))
    assert differences(plain(LLAMA[dtype]), outcome) == []


@pytest.mark.parametrize("copies", [Copies.LATE, Copies.THREADED])
@pytest.mark.parametrize("dtype", LLAMA)
@pytest.mark.parametrize("homes", PAIRWISE, ids="-".join)
def test_on_a_device_with_memory_of_its_own(
    homes: Homes, dtype: str, copies: Copies, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    with simulated(copies, Transfers.LAZY) as environment:
        config = placed(homes, nvme) | {"host_memory": "16MiB", "device_memory": "16MiB"}
        config["device_memory"] = least_memory(LLAMA[dtype], environment, "device_memory", **config)
        outcome = train_offloaded(LLAMA[dtype], environment, **config)
    assert differences(plain(LLAMA[dtype]), outcome) == []


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("tier", TIERS)
def test_backwards_that_reach_a_part(tier: str, name: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    recipe = PARTIAL[name]
    outcome = train_offloaded(recipe, **placed(("nvme", "host", tier), nvme))
    assert differences(plain(recipe), outcome) == []
    with simulated(Copies.LATE, Transfers.LAZY) as environment:
        outcome = train_offloaded(recipe, environment, **placed(("host", "nvme", tier), nvme), **AMPLE)
    assert differences(plain(recipe), outcome) == []


AMPLE = {"host_memory": "16MiB", "device_memory": "16MiB"}


def test_sums_in_fp32_are_others_than_sums_in_bf16(plain: Callable[[Recipe], Outcome]) -> None:
    assert differences(plain(LLAMA["bf16"]), plain(IN_BF16)) != []


def test_one_backward_a_step_is_as_if_nothing_was_said() -> None:
    outcomes = [
        train_plain(Recipe(compute_dtype="bf16", num_steps=3, num_micro_steps=1)),
        train_offloaded(Recipe(compute_dtype="bf16", num_steps=3, num_micro_steps=1, accumulation_steps=1)),
    ]
    assert differences(*outcomes) == []


def test_in_fp32_nothing_changes() -> None:
    said = Recipe(num_steps=3, num_micro_steps=2, accumulation_steps=2)
    outcome = train_offloaded(said)
    assert differences(train_plain(Recipe(num_steps=3, num_micro_steps=2)), outcome) == []


@pytest.mark.parametrize(("said", "expected"), [(4, 259.0), (1, 256.0), (None, 256.0)])
@pytest.mark.parametrize("tier", TIERS)
def test_small_addends_are_kept_in_fp32_and_lost_in_bf16(
    tier: str, said: int | None, expected: float, nvme: Path
) -> None:
    """Above 256 the next bf16 is 258: 256 + 1 is a tie, and rounded to even."""
    model = offload_prepared(
        Recipe(build=lambda: nn.Linear(64, 1, bias=False), compute_dtype="bf16", accumulation_steps=said),
        **placed(("host", "host", tier), nvme),
    )
    for addend in (256.0, 1.0, 1.0, 1.0):
        model(torch.full((1, 64), addend, dtype=torch.bfloat16)).sum().backward()
    assert float(zo.clip_grad_norm_(model, 1e9)) == 8 * expected
    residence = residence_of(model.weight)
    assert residence is not None
    assert residence.part.training is not None
    # As the run itself does, behind what is still being written.
    held = residence.run._read_gradient(residence.part, residence.part.training, 0)
    assert torch.equal(held, torch.full((64,), expected, dtype=held.dtype))
    with zo.full_params(model, grads=True):
        assert model.weight.grad.dtype is torch.bfloat16
        assert torch.equal(model.weight.grad, held.bfloat16().view(1, 64))
    zo.close(model)


@pytest.mark.parametrize("tier", TIERS)
def test_a_backward_after_clipping_adds_to_what_clipping_left(tier: str, nvme: Path) -> None:
    recipe = LLAMA["bf16"]
    model = recipe.build()
    states = OptimizerStates()
    reference = ReferenceOptimizer(model.parameters(), states, sums_in_fp32=True, lr=1e-2, **recipe.options)
    reference.take_over(model, "bf16", flat_layouts(model))
    ours = offload_prepared(recipe, **placed(("nvme", "host", tier), nvme))
    optimizer = zo.AdamW(ours.parameters(), lr=1e-2, **recipe.options)
    for max_norm in (0.7, 0.3, 0.2):
        for net in (model, ours):
            for micro_step in range(2):
                recipe.loss(net, batch(0, micro_step)).backward()
                reference.take_gradients(model.parameters())
        norm = reference_norm(model, gradient=reference.gradient)
        factor = float(np.float32(min(1.0, max_norm / (norm + 1e-6))))
        for param in model.parameters():
            reference.gradient(param).mul_(factor)
        assert float(zo.clip_grad_norm_(ours, max_norm)) == float(np.float32(norm))
        assert factor < 1.0
    for step in (reference.step, optimizer.step):
        step()
    expected = {name: param.detach() for name, param in model.named_parameters()}
    assert differences(Outcome(params=current_params(ours)), Outcome(params=expected)) == []
    zo.close(ours)


@pytest.mark.parametrize("tier", TIERS)
def test_a_loss_scale_is_taken_out_of_the_fp32_sums(tier: str, nvme: Path) -> None:
    recipe, scale = LLAMA["fp16"], 2.0**10
    model = recipe.build()
    reference = ReferenceOptimizer(model.parameters(), OptimizerStates(), sums_in_fp32=True, lr=1e-2, **recipe.options)
    reference.take_over(model, "fp16", flat_layouts(model))
    ours = offload_prepared(recipe, **placed(("host", "host", tier), nvme))
    optimizer = zo.AdamW(ours.parameters(), lr=1e-2, **recipe.options)
    scaler = zo.GradScaler(init_scale=scale)
    for step in range(2):
        for micro_step in range(4):
            (recipe.loss(model, batch(step, micro_step)) * scale).backward()
            reference.take_gradients(model.parameters())
            scaler.scale(recipe.loss(ours, batch(step, micro_step))).backward()
        norm = reference_norm(model, gradient=reference.gradient) / scale
        reference.grad_factor = float(np.float32(1.0 / scale * float(np.float32(min(1.0, 1.0 / (norm + 1e-6))))))
        reference.step()
        reference.zero_grad()
        scaler.unscale_(optimizer)
        assert float(zo.clip_grad_norm_(ours, 1.0)) == float(np.float32(norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    expected = {name: param.detach() for name, param in model.named_parameters()}
    assert differences(Outcome(params=current_params(ours)), Outcome(params=expected)) == []
    zo.close(ours)


@pytest.mark.parametrize("tier", TIERS)
def test_an_infinite_gradient_among_several_skips_the_step(tier: str, nvme: Path) -> None:
    model = offload_prepared(LLAMA["fp16"], **placed(("host", "host", tier), nvme))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    scaler = zo.GradScaler(init_scale=64.0)
    before = current_params(model)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(LLAMA["fp16"].loss(model, batch(0, 0)) * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert differences(Outcome(params=before), Outcome(params=current_params(model))) == []
    zo.close(model)


@pytest.mark.parametrize("tier", TIERS)
def test_editing_some_elements_leaves_the_others_their_fp32_bits(tier: str, nvme: Path) -> None:
    model = offload_prepared(LLAMA["bf16"], **placed(("host", "host", tier), nvme))
    for micro_step in range(3):
        LLAMA["bf16"].loss(model, batch(0, micro_step)).backward()
    param = model.model.layers[1].mlp.up_proj.weight
    residence = residence_of(param)
    assert residence is not None
    part, training = residence.part, residence.part.training
    assert training is not None

    def held() -> torch.Tensor:
        return residence.run._read_gradient(part, training, residence.slot_index)

    zo.clip_grad_norm_(model, 0.5)
    factor = training.grad_factors[residence.slot_index]
    before = held()
    assert factor < 1.0
    assert not torch.equal(before, before.bfloat16().float())
    with zo.full_params(model, grads=True):
        param.grad.view(-1)[5] = 3.0
    expected = before * factor
    expected[5] = 3.0
    assert torch.equal(held(), expected)
    assert training.grad_factors[residence.slot_index] == 1.0
    assert float(zo.clip_grad_norm_(param, 1e9)) == pytest.approx(float(expected.double().norm()), rel=2**-23)
    zo.close(model)


@pytest.mark.parametrize("tier", TIERS)
def test_adding_up_in_16_bits_is_told_once(tier: str, nvme: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zerooffload")
    train_offloaded(
        Recipe(compute_dtype="bf16", num_steps=2, num_micro_steps=3), **placed(("host", "host", tier), nvme)
    )
    (told,) = [record.getMessage() for record in caplog.records if "add up" in record.getMessage()]
    assert "bfloat16" in told
    assert "accumulation_steps" in told


@pytest.mark.parametrize(
    "recipe",
    [LLAMA["bf16"], Recipe(num_steps=2), Recipe(compute_dtype="bf16", num_steps=3, num_micro_steps=1)],
    ids=["said", "fp32", "one backward"],
)
def test_nothing_is_told_where_nothing_is_lost(recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zerooffload")
    train_offloaded(recipe)
    assert [record for record in caplog.records if "add up" in record.getMessage()] == []


def placed(homes: Homes, nvme: Path) -> dict[str, Any]:
    return {**dict(zip(("params", "optimizer", "gradients"), homes, strict=True)), "nvme_paths": [nvme]}
