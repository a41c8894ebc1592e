"""What a closed run held goes back to the system at once, and not when its cycles are collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.environments import simulated
from torch import nn

import zerooffload as zo
from zerooffload.entry.offloading import offload_in
from zerooffload.formats import MIB
from zerooffload.telemetry import process_resident_bytes

WIDTH, NUM_LAYERS = 1024, 8


@pytest.fixture
def _nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
@pytest.mark.parametrize("tier", ["device", "host"])
def test_homes_in_memory(tier: Literal["device", "host"]) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    zo.offload(model, zo.OffloadConfig(params=tier, optimizer=tier, gradients=tier))
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    held = process_resident_bytes()
    zo.close(model)
    # Two moments and a gradient; the parameters are the model's again. The call itself takes a few pages.
    assert held - process_resident_bytes() >= 12 * WIDTH * WIDTH * NUM_LAYERS - MIB
    assert bool(torch.isfinite(model[0].weight).all())


@pytest.mark.usefixtures("_nothing_is_collected")
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("forwards", [0, 1])
def test_windows_on_a_device(
    tier: Literal["host", "nvme"], forwards: int, make_net: Callable[[], nn.Module], tokens: torch.Tensor, nvme: Path
) -> None:
    """Also if a step has just ended, and the first units of the next one are on their way."""
    model = make_net()
    settings = zo.OffloadConfig(
        params=tier, optimizer=tier, gradients=tier, nvme_paths=[nvme], atomic_steps=False, device_memory="16MiB"
    )
    with simulated() as environment:
        offload_in(model, settings, environment)
        optimizer = zo.AdamW(model.parameters())
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(forwards):
            model(tokens)
        assert environment.accelerator.filled_bytes > 0
        zo.close(model)
        assert environment.accelerator.filled_bytes == 0
        with pytest.raises(zo.ConfigError, match="its values are gone"):
            model.embed.weight.sum()
