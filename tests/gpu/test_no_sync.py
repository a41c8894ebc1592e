"""In a step nothing of ours makes the host wait for the whole device: torch raises where it would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import Homes
from support.small_models import batch, small_llama

import zerooffload as zo

if TYPE_CHECKING:
    from pathlib import Path

HOMES: list[Homes] = [("nvme", "nvme", "nvme"), ("host", "nvme", "host"), ("host", "host", "host")]
MODES = ("after_backward", "under_next_forward", "during_backward")
NUM_WARM_UP_STEPS, NUM_STEPS = 3, 4


@contextmanager
def synchronizing_raises() -> Iterator[None]:
    """Waiting for an event is no synchronization of the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_no_step_synchronizes_the_device(homes: Homes, update: str, nvme: Path) -> None:
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    model = zo.offload(small_llama(), zo.OffloadConfig(**config, update=update, nvme_paths=[nvme], overwrite=True))
    try:
        optimizer = zo.AdamW(model.parameters(), lr=1e-3)
        batches = [batch(step, 0).cuda() for step in range(NUM_WARM_UP_STEPS + NUM_STEPS)]

        def step(tokens: torch.Tensor) -> None:
            model(tokens, labels=tokens).loss.backward()
            zo.clip_grad_norm_(model, 1e9)
            optimizer.step()
            optimizer.zero_grad()

        # Libraries make themselves ready in the first ones.
        for tokens in batches[:NUM_WARM_UP_STEPS]:
            step(tokens)
        with synchronizing_raises():
            for tokens in batches[NUM_WARM_UP_STEPS:]:
                step(tokens)
    finally:
        zo.close(model)


def test_where_the_host_waits_for_the_device_it_raises() -> None:
    """So the test above can fail."""
    value = torch.ones(1, device="cuda")
    with synchronizing_raises(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()
