"""Many steps of a tiny model, with evaluation and generation in between: nothing grows, and every stall has a name."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.long_training import measurements
from support.thoroughness import one_in
from torch import nn

import zerooffload as zo
from zerooffload.formats import MIB
from zerooffload.telemetry import Wait

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 500
WARM_STEPS = 100
VOCABULARY = 32
MOST_GROWTH_BYTES = 8 * MIB
"""Of the process: its allocator's whims. A chunk kept in each step would be some hundred MiB."""


ALL_ON_NVME, MIXED = ("nvme", "nvme", "nvme"), ("host", "nvme", "host")
CASES = [
    ("auto", ALL_ON_NVME),
    ("auto", MIXED),
    ("during_backward", MIXED),
    ("during_backward", ALL_ON_NVME),
][:: one_in(2)]


class Tiny(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def generated(model: nn.Module, start: torch.Tensor) -> torch.Tensor:
    tokens = start
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def now(model: nn.Module, folder: Path) -> dict[str, Any]:
    """What the process and the tiers hold, with nothing under way."""
    with zo.full_params(model, writeback=False):
        pass
    gc.collect()
    found = measurements(folder)
    leased = {tier.name: tier.leased_bytes for tier in zo.step_report(model).tiers}
    return {**found, "leased": leased}


@pytest.mark.parametrize(("update", "homes"), CASES)
def test_nothing_grows(update: str, homes: tuple[str, str, str], nvme: Path) -> None:
    torch.manual_seed(0)
    model = Tiny()
    where: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    zo.offload(model, zo.OffloadConfig(**where, nvme_paths=[nvme], host_memory="32MiB", threads=1, update=update))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    marks, stalls = {}, set()
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        # Clips now and then.
        zo.clip_grad_norm_(model, 0.8)
        optimizer.step()
        optimizer.zero_grad()
        stalls |= zo.step_report(model).waits.keys()
        if step % 5 == 0:
            with torch.no_grad():
                loss_of(model, 1000 + step)
        if step % 7 == 0:
            generated(model, torch.zeros(1, 1, dtype=torch.long))
        if step + 1 in {WARM_STEPS, NUM_STEPS}:
            marks[step + 1] = now(model, nvme)
    zo.close(model)
    assert stalls <= set(Wait)
    before, after = marks[WARM_STEPS], marks[NUM_STEPS]
    assert after.pop("resident bytes") < before.pop("resident bytes") + MOST_GROWTH_BYTES
    # The thread that commits a step waits for the next forward, or has just gone.
    for threads in ("threads", "python threads"):
        assert after.pop(threads) <= before.pop(threads) + 1
    assert after == before
