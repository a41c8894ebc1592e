"""Training with a loss scale on several ranks; in a module that spawned processes can import."""

from __future__ import annotations

from typing import Any

import torch
from support.rank_training import whole_params
from torch import nn

import zerooffload as zo

OVERFLOWING = (1, 1)
"""The rank and the step whose loss is infinite."""


def train_scaled(rank: int, world_size: int, moments: str) -> dict[str, Any]:
    """Three steps in fp16; what each left of scale and parameters."""
    del world_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    zo.offload(model, zo.OffloadConfig(compute_dtype="fp16", moments=moments, host_memory="16MiB", threads=1))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    scaler = zo.GradScaler(init_scale=256.0)
    scales, params, norms = [], [whole_params(model)], []
    for step in range(3):
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).half()
        loss = model(inputs).square().mean()
        scaler.scale(loss * (float("inf") if (rank, step) == OVERFLOWING else 1.0)).backward()
        scaler.unscale_(optimizer)
        norms.append(zo.clip_grad_norm_(model, 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        params.append(whole_params(model))
    zo.close(model)
    return {"scales": scales, "params": params, "norms": norms}
