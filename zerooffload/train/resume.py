"""The recipe of a run that is continued: recorded with every step, read back from its directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerooffload.errors import ConfigError
from zerooffload.journal import read_history
from zerooffload.journal.values import from_json
from zerooffload.tiers.directory import rank_directory
from zerooffload.train.recipe import Recipe, override, recipe_from

TRACKED_NAME = "recipe"


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
    """The recipe of the run in an nvme path, with settings replaced as `section.key=value` says.

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
    if len(offload.get("nvme_paths", ())) == 1:
        # The drive may be mounted elsewhere now.
        offload["nvme_paths"] = [str(path)]
    for text in overrides:
        override(values, text)
    return recipe_from(values, f"the recipe recorded in {path}")


def _recorded(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder: name one of the nvme_paths of the run")
    directory = rank_directory(path, int(os.environ.get("RANK", "0")))
    history = read_history([directory], all_paths=False)
    if not history.records:
        raise ConfigError(f"{path} holds no run that finished a step: name the first of the nvme_paths of the run")
    objects = history.records[max(history.records)].state.get("objects", {})
    if TRACKED_NAME not in objects:
        raise ConfigError(f"the run in {path} was not started by zerooffload train: continue it with zo.resume")
    values: dict[str, Any] = from_json(objects[TRACKED_NAME])
    return values
