"""Gradients that gather on ranks beside devices with little memory; in a module that spawned processes can import."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.compatibility import BASE_LOOP, recipe_of
from support.environments import Homes, least_memory, simulated_devices
from support.rank_compatibility import NUM_STEPS, SMALL_CHUNK_NUMEL, rank_batch
from support.reference_training import differences, train_offloaded

import zerooffload as zo

ON_HOST: Homes = ("host", "host", "host")


def train_in_little_and_ample_memory(rank: int, world_size: int, folder: str, models: Sequence[str]) -> list[str]:
    """What is not the same in the least device memory, by model; the error, if it ended with one."""
    del world_size
    warnings.simplefilter("ignore")
    wrong = []
    for number, model in enumerate(models):
        own = Path(folder, str(number))
        own.mkdir(exist_ok=True)
        recipe = replace(recipe_of(model, BASE_LOOP), batch=partial(rank_batch, rank=rank), num_steps=NUM_STEPS)
        config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), ON_HOST, strict=True))
        config |= {"stage": 2, "nvme_paths": [own], "host_memory": "16MiB", "device_memory": "16MiB"}
        with pytest.MonkeyPatch.context() as patch, simulated_devices():
            patch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", SMALL_CHUNK_NUMEL)
            ample = train_offloaded(recipe, **config)
            config["device_memory"] = least_memory(recipe, None, "device_memory", **config)
            try:
                found = differences(ample, train_offloaded(recipe, **config))
            except zo.BudgetError as error:
                found = [str(error)]
        wrong += [f"{model}: {words}" for words in found]
    return wrong
