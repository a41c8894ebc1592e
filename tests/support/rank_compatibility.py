"""Kinds of models on several ranks; in a module that spawned processes can import."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.compatible_models import MODELS, add_up_by_block
from support.environments import Homes
from support.rank_emulation import EmulatedRanks
from support.rank_training import OPTIONS, offload_config
from support.reference_training import current_params
from support.small_models import batch
from torch import nn

import zerooffload as zo

NUM_STEPS = 3
MAX_NORM = 1.0
Case = tuple[int, str]
"""A stage, and a model."""


def rank_loss(model: nn.Module, name: str, step: int, rank: int) -> torch.Tensor:
    """Of a rank's own batch."""
    return MODELS[name].loss(model, batch(step, rank))


def train_models(
    rank: int, world_size: int, folder: str, homes: Homes, cases: Sequence[Case]
) -> dict[Case, Mapping[str, Any]]:
    """Each model after the other, in a stage: norms and parameters, or the error."""
    warnings.simplefilter("ignore")
    results: dict[Case, Mapping[str, Any]] = {}
    for stage, name in cases:
        own_folder = Path(folder, f"{name.replace(' ', '-')}-{world_size}-{stage}")
        own_folder.mkdir(exist_ok=True)
        try:
            results[stage, name] = _train(rank, name, offload_config(str(own_folder), homes, stage=stage))
        except zo.ZeroOffloadError as error:
            results[stage, name] = {"refused": str(error)}
    return results


def _train(rank: int, name: str, config: zo.OffloadConfig) -> Mapping[str, Any]:
    model = zo.offload(MODELS[name].build().train(), config)
    try:
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        norms = []
        for step in range(NUM_STEPS):
            rank_loss(model, name, step, rank).backward()
            norms.append(zo.clip_grad_norm_(model, MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        params = {key: value for key, value in current_params(model).items() if type(value) is torch.Tensor}
    finally:
        zo.close(model)
    return {"norms": norms, "params": params}


def emulate(name: str, world_size: int) -> Mapping[str, Any]:
    """The same in one process, in plain PyTorch."""
    model = MODELS[name].build().train()
    if MODELS[name].shares_inputs:
        add_up_by_block(model)
    ranks = EmulatedRanks(model, world_size, sums_in_fp32=True, **OPTIONS)
    norms = []
    for step in range(NUM_STEPS):
        ranks.micro_step([partial(rank_loss, name=name, step=step, rank=rank) for rank in range(world_size)])
        norms.append(ranks.clip(MAX_NORM))
        ranks.step()
    return {
        "norms": norms,
        "params": {key: value for key, value in ranks.params().items() if type(value) is torch.Tensor},
    }
