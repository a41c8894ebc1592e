"""A small training on one rank or several; in a module that spawned processes can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.environments import COMBINATIONS
from support.small_models import VOCABULARY, small_llama

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

STEPS = 3
ACCUMULATION = 2
GLOBAL_BATCH = 12


def train(rank: int, world_size: int, folder: str, tiers: tuple[str, str, str]) -> dict[str, Any]:
    """A few steps; losses are means over the global batch."""
    params, optimizer_tier, gradients = tiers
    model = small_llama()
    config = zo.OffloadConfig(
        params=params,
        optimizer=optimizer_tier,
        gradients=gradients,
        nvme_paths=[folder],
        host_memory="32MiB",
        threads=1,
    )
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 8), generator=generator).chunk(world_size)[rank]
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / ACCUMULATION).backward()
            mean = loss.detach() / world_size
            if world_size > 1:
                dist.all_reduce(mean)
            losses.append(mean.item())
        norms.append(zo.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    with zo.full_params(model, writeback=False):
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
    report = zo.step_report(model)
    residences = [residence_of(param) for param in model.parameters()]
    flats = {id(item.part): item.part.flat.layout.nbytes for item in residences if item is not None}
    zo.close(model)
    return {
        "losses": losses,
        "norms": norms,
        "params": values,
        "leased": {tier.name: tier.leased_bytes for tier in report.tiers},
        "planned": {tier.name: tier.planned_bytes for tier in report.tiers},
        "moved": dict(report.bytes_moved),
        "flat_bytes": sum(flats.values()),
    }


def train_all_tiers(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Every combination of tiers: bit-equal to the first."""
    first: dict[str, Any] | None = None
    for tiers in COMBINATIONS:
        result = train(rank, world_size, folder, tiers)
        first = first or result
        assert result["losses"] == first["losses"], tiers
        assert result["norms"] == first["norms"], tiers
        assert all(torch.equal(result["params"][name], first["params"][name]) for name in first["params"]), tiers
        assert result["leased"] == result["planned"], tiers
    assert first is not None
    return first
