"""Frozen parameters that are made of other tensors: quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.eight_bits import EightBits
from torch import nn
from torch.nn import functional

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

Offload = Callable[..., nn.Module]
WIDTH = 64


class Quantized(nn.Module):
    """Frozen 8-bit blocks with a trained bias each; the root computes with the last one's weight, too."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for block in self.blocks:
            block.weight = nn.Parameter(EightBits.of(block.weight.detach()), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return functional.linear(hidden, self.blocks[2].weight).square().mean()


@pytest.fixture(params=["host", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


def hidden_input() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def flats_of(weight: nn.Parameter) -> dict[str, torch.dtype]:
    """The stored parts' names and dtypes."""
    found = {}
    for part in ("codes", "scale"):
        residence = residence_of(getattr(weight, part))
        assert residence is not None
        layout = residence.part.flat.layout
        found[layout.slots[residence.slot_index].param.name] = layout.dtype
    return found


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_parts_move_as_they_are(offload: Offload, tier: str, dtype: str | None) -> None:
    model = offload(Quantized(), tier, compute_dtype=dtype)
    assert flats_of(model.blocks[0].weight) == {
        "blocks.0.weight.codes": torch.int8,
        "blocks.0.weight.scale": torch.float32,
    }


def test_it_computes_what_the_model_in_memory_does(offload: Offload, tier: str) -> None:
    model, plain = offload(Quantized(), tier), Quantized()
    optimizer = zo.AdamW(model.parameters())
    for net in (model, plain):
        net(hidden_input()).backward()
    with zo.full_params(model, grads=True):
        for ours, theirs in zip(model.blocks, plain.blocks, strict=True):
            assert torch.equal(ours.bias.grad, theirs.bias.grad)
            assert torch.equal(ours.weight.codes, theirs.weight.codes)
    assert float(zo.clip_grad_norm_(model, 1.0)) > 0
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(plain.blocks)


def test_a_state_dict_has_tensors_of_that_kind(offload: Offload, tier: str) -> None:
    plain = Quantized()
    state = offload(Quantized(), tier).state_dict()
    for number, block in enumerate(plain.blocks):
        weight: Any = state[f"blocks.{number}.weight"]
        assert isinstance(weight, EightBits)
        assert torch.equal(weight.codes, block.weight.codes)
        assert torch.equal(weight.scale, block.weight.scale)


def test_what_is_trained_must_be_numbers() -> None:
    model = Quantized()
    model.blocks[1].weight.requires_grad_()
    with pytest.raises(zo.ConfigError, match=r"blocks\.1\.weight is a EightBits.*requires_grad=False"):
        zo.offload(model)


def test_the_plan_counts_their_bytes(offload: Offload) -> None:
    """A byte a code. What is shorter takes a file block of 4,096: scale, bias, its moments and its gradient."""
    model = offload(Quantized(), "nvme", atomic_steps=False)
    optimizer = zo.AdamW(model.parameters())
    model(hidden_input()).backward()
    optimizer.step()
    nvme = zo.step_report(model).tiers[2]
    assert nvme.planned_bytes == nvme.leased_bytes == 3 * (WIDTH * WIDTH + 4 * 4096)


def test_parts_on_the_meta_device_are_refused() -> None:
    weight = EightBits(torch.empty(4, 4, dtype=torch.int8, device="meta"), torch.empty(4, 1, device="meta"))
    model = nn.Linear(4, 4, device="meta")
    model.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(zo.ConfigError, match=r"weight\.codes has no values.*load"):
        zo.offload(model)
