"""Micro-steps that reach a part of each unit, on several ranks; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from support.environments import Homes
from support.rank_training import MAX_NORM, OPTIONS, offload_config, whole_params
from support.small_models import batch, half_used
from torch import nn

import zerooffload as zo

NUM_STEPS = 2
NUM_MICRO_STEPS = 3
# With the embedding in the root's unit the collection window has room for all units, none of which is ever complete.
FIELDS = {"compute_dtype": "bf16", "accumulation_steps": NUM_MICRO_STEPS, "units": ["blocks.*"]}


def loss_of(rank: int, step: int, micro_step: int) -> Callable[[nn.Module], torch.Tensor]:
    """The loss of a rank's own batch."""
    return partial(lambda tokens, model: model(tokens), batch(step, 10 * rank + micro_step))


def train_halves(rank: int, world_size: int, folder: str, each_homes: Sequence[Homes]) -> dict[str, Any]:
    """Norms and parameters: the same under each choice of homes."""
    del world_size
    results: list[dict[str, Any]] = []
    for homes in each_homes:
        model = half_used()
        zo.offload(model, offload_config(folder, homes, **FIELDS))
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        norms = []
        for step in range(NUM_STEPS):
            for micro_step in range(NUM_MICRO_STEPS):
                with zo.no_sync(model) if micro_step < NUM_MICRO_STEPS - 1 else nullcontext():
                    loss_of(rank, step, micro_step)(model).backward()
            norms.append(zo.clip_grad_norm_(model, MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        results.append({"norms": norms, "params": whole_params(model)})
        zo.close(model)
        assert results[-1]["norms"] == results[0]["norms"], homes
        for name, value in results[0]["params"].items():
            assert torch.equal(results[-1]["params"][name], value), (homes, name)
    return results[0]
