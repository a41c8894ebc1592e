"""A traced step of several ranks; in a module that spawned processes can import."""

from __future__ import annotations

from pathlib import Path

from support.rank_training import OPTIONS, Share, global_batch, offload_config
from support.small_models import MODELS

import zerooffload as zo


def trace_a_step(rank: int, world_size: int, folder: str, path: str) -> dict[str, int]:
    """What the second of two steps moved, which is traced."""
    del world_size
    model = MODELS["gpt2"]()
    zo.offload(model, offload_config(folder, ("nvme", "nvme", "nvme")))
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)

    def step(number: int) -> None:
        Share(rank, rank + 1).loss(model, global_batch(number, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with zo.trace(model, Path(path)):
        step(1)
    moved = dict(zo.step_report(model).bytes_moved)
    zo.close(model)
    return moved
