"""What a closed run held goes back to the system at once, and not when its cycles are collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import zerooffload as zo
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
def test_homes_in_memory() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    zo.offload(model, zo.OffloadConfig(params="host", optimizer="host", gradients="host"))
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    held = process_resident_bytes()
    zo.close(model)
    # Two moments and a gradient; the parameters are the model's again. The call itself takes a few pages.
    assert held - process_resident_bytes() >= 12 * WIDTH * WIDTH * NUM_LAYERS - MIB
    assert bool(torch.isfinite(model[0].weight).all())
