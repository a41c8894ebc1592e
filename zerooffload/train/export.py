"""A model folder from what a run of `zerooffload train` left on its nvme paths, or in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerooffload as zo
from zerooffload.checkpoint.manifest import read_manifests
from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface import (
    ModelSource,
    build_model,
    model_config,
    opened_model,
    original_tokenizer,
    source_config,
)
from zerooffload.integrations.huggingface.tokenizers import BYTES
from zerooffload.train.loop import model_source, offloaded
from zerooffload.train.ranks import joined_ranks
from zerooffload.train.recipe import Recipe
from zerooffload.train.resume import TRACKED_NAMES


def export_run(
    recipe: Recipe,
    directory: Path,
    *,
    checkpoint: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> int:
    """Write the model of the newest step that is committed, with its tokenizer; the run stays what it is.

    Under torchrun every rank calls it, as many as trained.

    Parameters
    ----------
    recipe : Recipe
        As it was recorded.
    checkpoint : Path, optional
        Export this one instead.
    dtype, max_shard_size, overwrite
        See `zo.export_safetensors`.

    Returns
    -------
    int
        The step.

    Raises
    ------
    ConfigError
        If the paths hold no finished step, or the folder cannot be made.
    CheckpointError
        If files are damaged, or the folder's cannot be written.
    BudgetError
        If the model does not fit the recipe's budgets any more.
    """
    source = model_source(recipe)
    config = model_config(source)
    name = recipe.model.tokenizer or recipe.model.name or BYTES
    tokenizer = None if name == BYTES else original_tokenizer(name, trust_remote_code=source.trust_remote_code)
    opening = offloaded(lambda: _without_values(recipe, source, config), recipe)
    with joined_ranks(recipe.training.rank_timeout_seconds), opening as model:
        # Training went without.
        config.use_cache = source_config(source).use_cache
        step = _take_values(model, recipe, checkpoint)
        zo.export_safetensors(
            model, directory, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer, overwrite=overwrite
        )
    return step


@contextmanager
def _without_values(recipe: Recipe, source: ModelSource, config: Any) -> Iterator[tuple[nn.Module, None]]:
    """The model as it was trained, on the meta device."""
    if source.name is None:
        with torch.device("meta"):
            model = build_model(source, config)
        opened: AbstractContextManager[tuple[nn.Module, Any]] = nullcontext((model, None))
    else:
        opened = opened_model(source, config, strict=recipe.model.strict)
    with opened as (model, _):
        _check_buffers(model)
        yield model, None


def _take_values(model: nn.Module, recipe: Recipe, checkpoint: Path | None) -> int:
    """Those of a checkpoint, or of the newest committed step; the number of steps that made them."""
    optimizer = recipe.optimizer.make(model.parameters())
    # A schedule leaves a mark among the optimizer's settings, which are compared.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    zo.track(model, **{name: _Left() for name in TRACKED_NAMES})
    if checkpoint is not None:
        zo.load(checkpoint, model, optimizer)
        return read_manifests(checkpoint)[0].step
    step = zo.resume(model, optimizer)
    if not step:
        raise ConfigError("there is no finished step to export: start with zerooffload train")
    return step


class _Left:
    """In place of what a run tracks: nobody trains."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Nothing to put back."""


def _check_buffers(model: nn.Module) -> None:
    """See that steps hold all that is exported."""
    for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        raise ConfigError(
            f"{name} is a buffer, which committed steps do not hold: load the model as you did for training, call"
            " zo.resume and then zo.export_safetensors"
        )
