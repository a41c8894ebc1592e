"""What a committed step remembers beside the states on tiers: settings, schedules, data position, random states.

[Note: two moments]
A user's loop changes things after `optimizer.step()` that belong to the step: it calls `scheduler.step()`, it updates
the loss scale. And it draws the next batch before the next forward, which does not belong to it. So the position in the
data is taken when `step()` is called; schedules, scalers (objects with a `step` method) and the optimizers' settings
when the next training forward begins. Random states are taken at both moments: the first is put back by `resume`, the
second when the first training forward after it begins, so that what draws random numbers in between may differ.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from zerooffload.accelerator import Accelerator
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.journal.values import from_json, to_json


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and put back."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Put it back."""


class Tracking:
    """The objects whose states are committed with each step.

    Holds the user's objects, and the optimizers weakly: they hold the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._objects: dict[str, Stateful] = {}
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def track(self, objects: Mapping[str, Any]) -> None:
        """See `zo.track`."""
        for name, item in objects.items():
            if not isinstance(item, Stateful):
                raise ConfigError(
                    f"zo.track: {name} is a {type(item).__name__}, which has no state_dict and load_state_dict"
                )
            if self._objects.get(name, item) is not item:
                raise ConfigError(f"zo.track: {name} is tracked already, and is another object")
        self._objects.update(objects)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the settings of one more optimizer."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are alive."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def at_step(self) -> dict[str, Any]:
        """What is taken when `step()` is called: a JSON value."""
        return {"objects": self._states(is_schedule=False), "random": self._random_states()}

    def at_forward(self) -> dict[str, Any]:
        """What is taken when the next training forward begins: a JSON value."""
        return {"schedules": self._states(is_schedule=True), **_all_settings(self.optimizers())}

    def now(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Everything as it is now, with the settings of these optimizers: a JSON value.

        Raises
        ------
        ConfigError
            If one is not this run's.
        """
        known = self.optimizers()
        if not all(any(optimizer is one for one in known) for optimizer in optimizers):
            raise ConfigError("an optimizer has none of this model's parameters: give those that train it")
        return {**self.at_step(), **self.at_forward(), **_all_settings(optimizers)}

    def random_at_forward(self) -> dict[str, Any]:
        """Random states at that moment: a JSON value."""
        return {"random_at_forward": self._random_states()}

    def put_back(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let everything be as it was recorded; random states if there are any.

        Raises
        ------
        ConfigError
            If other objects are tracked now, or the optimizers have other groups.
        """
        recorded = {**state["objects"], **state["schedules"]}
        missing = recorded.keys() - self._objects.keys()
        if missing:
            raise ConfigError(
                f"the run tracked {', '.join(sorted(missing))}: give the same objects to zo.track before it goes on"
            )
        new = self._objects.keys() - recorded.keys()
        if new:
            raise ConfigError(f"{', '.join(sorted(new))} was not tracked by the run that is continued")
        self._put_back_settings(state["optimizers"], optimizers)
        for name, value in recorded.items():
            self._objects[name].load_state_dict(from_json(value))
        if "random" in state:
            self.put_back_random(state["random"])

    def put_back_random(self, states: Mapping[str, Any]) -> None:
        """Let random numbers go on as they would have."""
        python, numpy, cpu = (from_json(states[name]) for name in ("python", "numpy", "torch"))
        random.setstate((python[0], tuple(python[1].tolist()), python[2]))
        np.random.set_state(numpy)  # noqa: NPY002 - the user's code may use the global one
        torch.set_rng_state(cpu)
        if states.get("accelerator") is not None:
            self._accelerator.set_random_state(from_json(states["accelerator"]))

    def _random_states(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        states = {
            "python": (version, np.array(words, np.uint32), gauss),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
            "torch": torch.get_rng_state(),
            "accelerator": self._accelerator.random_state(),
        }
        return {name: to_json(value, f"the random state of {name}") for name, value in states.items()}

    def _states(self, *, is_schedule: bool) -> dict[str, Any]:
        return {
            name: to_json(item.state_dict(), f"the state of {name}")
            for name, item in self._objects.items()
            if callable(getattr(item, "step", None)) == is_schedule
        }

    def _put_back_settings(self, recorded: list[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(recorded) != len(optimizers):
            raise ConfigError(
                f"the run had {len(recorded)} optimizer(s), now there are {len(optimizers)}: give all of them, in the"
                " order in which they were made"
            )
        for optimizer, settings in zip(optimizers, recorded, strict=True):
            groups: list[dict[str, Any]] = from_json(settings)
            if len(groups) != len(optimizer.param_groups):
                raise ConfigError(
                    f"the optimizer had {len(groups)} param group(s), now it has {len(optimizer.param_groups)}:"
                    " make it as before"
                )
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                if group.keys() - {"params", "param_names"} != values.keys():
                    raise CheckpointError(f"the optimizer had the settings {', '.join(values)}: it is another one now")
                group.update(values)


def _all_settings(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    return {"optimizers": [_settings(optimizer) for optimizer in optimizers]}


def _settings(optimizer: torch.optim.Optimizer) -> Any:
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return to_json(groups, "the optimizer's settings")
