"""Cells of the table on several ranks; in a module that spawned processes can import."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compatibility import Cell, plain_recipe, recipe_of, train_cell
from support.compatible_models import MODELS
from support.rank_emulation import EmulatedRanks
from support.ranks import COLLECTIVE_TIMEOUT
from support.reference_training import Outcome, Training, prepared, train
from support.small_models import batch
from torch.distributed.distributed_c10d import _get_default_store

import zerooffload as zo

SMALL_CHUNK_NUMEL = 4096
"""So that a block of a small model is several chunks."""
NUM_STEPS = 2
"""With the second, what the first has left behind is used."""


def rank_batch(step: int, micro_step: int, rank: int) -> torch.Tensor:
    """A rank's own."""
    return batch(step, 10 * micro_step + rank)


def train_cells(rank: int, world_size: int, folder: str, cells: Sequence[Cell]) -> list[Mapping[str, Any]]:
    """Each cell after the other: its outcome, or the error."""
    warnings.simplefilter("ignore")
    results = []
    store = _get_default_store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", SMALL_CHUNK_NUMEL)
        for number, cell in enumerate(cells):
            # Groups that a run makes stay until the default one ends, and the threads of hundreds take time.
            dist.destroy_process_group()
            own_store = dist.PrefixStore(f"cell {number}", store)
            dist.init_process_group(
                "gloo", store=own_store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
            )
            # A rank whose cell is refused at once would end its group while another still connects to it.
            dist.barrier()
            own_folder = Path(folder, str(number))
            own_folder.mkdir(exist_ok=True)
            changes = {"batch": partial(rank_batch, rank=rank), "num_steps": NUM_STEPS}
            recipe = replace(recipe_of(cell.model, cell.loop), **changes)
            # What was compiled for another cell counts in limits of torch's.
            torch.compiler.reset()
            try:
                results.append(as_values(train_cell(cell, recipe, own_folder)))
            except zo.ZeroOffloadError as error:
                results.append({"refused": str(error)})
    return results


def as_values(outcome: Outcome) -> Mapping[str, Any]:
    """What can be sent: values and tensors of torch's own."""
    tensors = {
        kind: {name: value for name, value in getattr(outcome, kind).items() if type(value) is torch.Tensor}
        for kind in ("params", "buffers")
    }
    return {"losses": outcome.losses, "found": outcome.found, "norms": outcome.norms, **tensors}


def emulate(model_name: str, loop: str, world_size: int) -> Outcome:
    """The same in one process, in plain PyTorch: all ranks' losses, and the last rank's buffers and what it finds."""
    recipe = replace(plain_recipe(recipe_of(model_name, loop), MODELS[model_name]), num_steps=NUM_STEPS)
    model = prepared(recipe)
    recipe.prepare_offloaded(model)
    ranks = EmulatedRanks(model, world_size, groups=recipe.groups(model), lr=recipe.learning_rate, **recipe.options)

    def micro_step(step: int, number: int) -> list[float]:
        batches = [rank_batch(step, number, rank) for rank in range(world_size)]
        losses = [partial(lambda tokens, model: recipe.loss(model, tokens), tokens) for tokens in batches]
        of_ranks = ranks.micro_step(losses, recipe.num_micro_steps, recipe.backwards)
        ranks.show_gradients()
        return of_ranks

    outcome = train(recipe, Training(model, ranks.optimizer, micro_step, ranks.clip))
    outcome.params = ranks.params()
    return outcome
