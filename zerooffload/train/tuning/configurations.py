"""Configurations around a plan: what each is predicted to take, the fastest first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zerooffload.config import MomentFormat, OffloadConfig, TierName, UpdateMode
from zerooffload.errors import BudgetError, ConfigError
from zerooffload.planner.find import settings_of
from zerooffload.planner.plan import STATES, Homes, Plan
from zerooffload.planner.profiles import MachineProfile
from zerooffload.train.planning import Planner
from zerooffload.train.recipe import Recipe

_ACTIVATIONS = ("keep", "device", "host", "nvme")
_MOMENTS: Sequence[MomentFormat] = ("fp32", "bf16", "8bit")
_FREE = dict.fromkeys([*STATES, "update", "activations"], "auto")
"""What a plan may choose anew; other numbers come of none of it."""
_NUM_CENTRES = 2
"""Around so many of the best predicted, configurations are looked for once more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Configuration:
    """Settings of a recipe's [offload], and what a step of them is predicted to take.

    Attributes
    ----------
    recipe : Recipe
        Nothing in it is left to a plan.
    plan : Plan
    """

    recipe: Recipe
    plan: Plan

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What was set of [offload], as plain values."""
        return self.recipe.offload.model_dump(mode="json", exclude_unset=True)

    @cached_property
    def key(self) -> str:
        """The same for the same settings."""
        return json.dumps(self.settings, sort_keys=True)

    @cached_property
    def run(self) -> object:
        """Equal for settings that are the same run in other words."""
        config, placement = self.recipe.offload, self.plan.announced.placement
        inputs = dict(placement.block_inputs.homes)
        return repr((dict(self.plan.homes), self.plan.kind, inputs, config.threads, config.moments, config.slice_size))

    def changes(self, first: Configuration) -> dict[str, Any]:
        """The settings that are others than those of `first`."""
        mine, others = (one.recipe.offload.model_dump(mode="json") for one in (self, first))
        return {name: value for name, value in mine.items() if value != others[name]}


class Surroundings:
    """Finds configurations.

    Parameters
    ----------
    num_cores : int
        On which the optimizer's kernel runs by default.
    may_use_moments : bool
        Whether formats of moments may change, which changes the numbers.
    """

    def __init__(
        self,
        recipe: Recipe,
        machine: MachineProfile,
        planner: Planner,
        *,
        num_cores: int,
        may_use_moments: bool = False,
    ) -> None:
        self._recipe = recipe
        self._machine = machine
        self._planner = planner
        self._num_cores = num_cores
        self._moments = _MOMENTS if may_use_moments else ()
        self._found: dict[object, Configuration] = {}

    def first(self) -> Configuration:
        """The recipe's own, with what it leaves to a plan as planned.

        Raises
        ------
        BudgetError
            If it does not fit.
        ConfigError
            If the model, a setting or the profile cannot work as given.
        """
        return self._configured({})

    def others(self, first: Configuration) -> list[Configuration]:
        """All others that fit the budgets, the fastest predicted first."""
        self._found = {first.run: first}
        free = self._add(_FREE)
        centres = [first, *([free] if free is not None else [])]
        for _ in range(2):
            for centre in centres:
                for changes in self._neighbours(centre):
                    self._add({**_chosen(centre), **changes})
            centres = self._sorted(first)[:_NUM_CENTRES]
        return self._sorted(first)

    def _sorted(self, first: Configuration) -> list[Configuration]:
        """Of those alike, the one that changes the least comes first."""
        others = [one for one in self._found.values() if one is not first]
        return sorted(others, key=lambda one: (one.plan.estimate.seconds, len(one.changes(first))))

    def _add(self, settings: Mapping[str, Any]) -> Configuration | None:
        try:
            found = self._configured(settings)
        except (BudgetError, ConfigError):
            # It does not fit, or is nothing for this model.
            return None
        return self._found.setdefault(found.run, found)

    def _configured(self, settings: Mapping[str, Any]) -> Configuration:
        asked = _with(self._recipe, settings)
        plan = self._planner.plan(asked, self._machine)
        return Configuration(recipe=_with(asked, plan.settings), plan=plan)

    def _neighbours(self, centre: Configuration) -> Iterator[dict[str, Any]]:
        """Changes of one setting each."""
        config = centre.recipe.offload
        for update in map(str, UpdateMode):
            yield {"update": update}
        for size in _next_sizes(self._recipe.training.batch_size, config.slice_size):
            yield {"micro_batch_size": size, **({"activations": "auto"} if config.activations == "keep" else {})}
        for activations in _ACTIVATIONS:
            # What keeps all activations has no slices.
            yield {"activations": activations, **({"micro_batch_size": None} if activations == "keep" else {})}
        for state in STATES:
            for step in (-1, 1):
                yield {state: settings_of(_moved(centre.plan.homes, state, step, self._tiers(config)))[state]}
        for threads in {self._num_cores - 1, self._num_cores // 2} - {0}:
            yield {"threads": threads}
        for moments in self._moments:
            yield {"moments": moments}

    def _tiers(self, config: OffloadConfig) -> list[TierName]:
        tiers = [] if self._machine.device.shares_host_memory else [TierName.DEVICE]
        return [*tiers, TierName.HOST, *([TierName.NVME] if config.nvme_paths else [])]


def _chosen(centre: Configuration) -> dict[str, Any]:
    """What of a configuration its neighbours share."""
    names = (*_FREE, "micro_batch_size", "threads", "moments", "nvme_paths")
    return {name: centre.settings[name] for name in names if name in centre.settings}


def _with(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    values = recipe.offload.model_dump(exclude_unset=True)
    return recipe.model_copy(update={"offload": OffloadConfig(**{**values, **settings})})


def _next_sizes(batch_size: int, size: int | None) -> list[int | None]:
    """Of slices: the next larger and smaller ones that divide the batch."""
    sizes: list[int | None] = [*(number for number in range(1, batch_size) if batch_size % number == 0), None]
    place = sizes.index(size) if size in sizes else len(sizes) - 1
    return [sizes[near] for near in (place - 1, place + 1) if 0 <= near < len(sizes)]


def _moved(homes: Mapping[str, Homes], state: str, step: int, tiers: Sequence[TierName]) -> dict[str, Homes]:
    """The homes with one state a tier further from the device, or nearer, wherever there is one."""

    def moved(tier: TierName) -> TierName:
        place = tiers.index(tier) + step if tier in tiers else -1
        return tiers[place] if 0 <= place < len(tiers) else tier

    return {name: replace(of_unit, **{state: moved(getattr(of_unit, state))}) for name, of_unit in homes.items()}
