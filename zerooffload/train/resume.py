"""The recipe of a run that is continued: recorded with every step and checkpoint, read back from there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerooffload.checkpoint.folders import find_checkpoint, holds_checkpoints
from zerooffload.checkpoint.manifest import read_manifests
from zerooffload.errors import ConfigError
from zerooffload.journal import read_history
from zerooffload.journal.values import from_json
from zerooffload.tiers.directory import rank_directory
from zerooffload.train.recipe import Recipe, override, recipe_from

TRACKED_NAME = "recipe"
TRACKED_NAMES = ("schedule", "scaler", "order", TRACKED_NAME)
"""What a run tracks."""


class RecordedRecipe:
    """Lets a recipe be tracked, so that a record tells how to go on."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def state_dict(self) -> dict[str, Any]:
        """The recipe's settings."""
        return self._recipe.model_dump(mode="json", exclude_unset=True)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Nothing: a run is continued with the recipe that was read before it began."""


def recorded_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of the run in an nvme path, or of a checkpoint, with settings replaced as `section.key=value` says.

    Raises
    ------
    ConfigError
        If `zerooffload train` left no run there, or a setting is wrong.
    CheckpointError
        If its files are damaged.
    """
    values = _recorded(path)
    offload = values.setdefault("offload", {})
    offload["overwrite"] = False
    if len(offload.get("nvme_paths", ())) == 1 and checkpoint_in(path) is None:
        # The drive may be mounted elsewhere now.
        offload["nvme_paths"] = [str(path)]
    for text in overrides:
        override(values, text)
    return recipe_from(values, f"the recipe recorded in {path}")


def checkpoint_in(path: Path) -> Path | None:
    """The newest checkpoint in a folder, or the one that the folder is; None if there is none, as in an nvme path.

    Raises
    ------
    CheckpointError
        If the folder cannot be read.
    """
    is_nvme_path = _directory_in(path).is_dir()
    return find_checkpoint(path) if not is_nvme_path and holds_checkpoints(path) else None


def _recorded(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a folder: name one of the nvme_paths of the run, or where it saved checkpoints"
        )
    objects = _tracked(path)
    if TRACKED_NAME not in objects:
        raise ConfigError(
            f"the run in {path} was not started by zerooffload train: continue it with zo.resume or zo.load"
        )
    values: dict[str, Any] = from_json(objects[TRACKED_NAME])
    return values


def _tracked(path: Path) -> Mapping[str, Any]:
    """The states of tracked objects, by name."""
    checkpoint = checkpoint_in(path)
    if checkpoint is not None:
        return read_manifests(checkpoint)[0].run.objects
    history = read_history([_directory_in(path)], all_paths=False)
    if not history.records:
        raise ConfigError(
            f"{path} holds no run that finished a step, and no checkpoint: name the first of the nvme_paths of the run,"
            " or where it saved checkpoints"
        )
    objects: Mapping[str, Any] = history.records[max(history.records)].state.get("objects", {})
    return objects


def _directory_in(path: Path) -> Path:
    return rank_directory(path, int(os.environ.get("RANK", "0")))
