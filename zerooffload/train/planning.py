"""Plans of runs of `zerooffload train`, of a recipe or of a model and a batch: nothing of the data is read."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerooffload.calibration import remembered_machine
from zerooffload.config import OffloadConfig
from zerooffload.entry.planning import machine_for_plans, plan_model
from zerooffload.errors import BudgetError, ConfigError
from zerooffload.integrations.huggingface import LanguageModelProfiles, ModelSource, build_model, model_config
from zerooffload.planner.plan import Plan
from zerooffload.planner.profiles import MachineProfile, ModelProfile, cluster_of, typical_machine
from zerooffload.sharding.grouping import find_units
from zerooffload.train.loop import model_source
from zerooffload.train.recipe import Recipe, override, read_values, recipe_from

_log = logging.getLogger("zerooffload")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be planned.

    Attributes
    ----------
    values : Mapping[str, Any]
        Of a recipe.
    whose : str
        Begins messages about them.
    machine : str, optional
        A profile's name or file. Default: what is remembered of this machine.
    settings : tuple[str, ...]
        "section.key=value": replaces one of the recipe, or, if the section is "machine", of the profile.
        "machine.drives=2" takes its first two drives, "machine.nodes=4" four such machines.
    """

    values: Mapping[str, Any]
    whose: str
    machine: str | None = None
    settings: tuple[str, ...] = ()

    def changed(self, what_if: str) -> Subject:
        """The same with another machine, or with another setting."""
        if "=" in what_if:
            return replace(self, settings=(*self.settings, what_if))
        return replace(self, machine=what_if)

    def resolved(self) -> tuple[Recipe, MachineProfile]:
        """Recipe and machine.

        Raises
        ------
        ConfigError
            If a setting is unknown or wrong, or there is no profile.
        """
        machine = changed_machine(machine_for_plans(self.machine), self._of_machine)
        recipe = self.recipe([drive.path for drive in machine.drives])
        return recipe, with_drives_of(recipe.offload.nvme_paths, machine)

    def recipe(self, paths: Sequence[str] = ()) -> Recipe:
        """The recipe, with these as its paths on drives if it names none.

        Raises
        ------
        ConfigError
            If a setting is unknown or wrong.
        """
        values = copy.deepcopy(dict(self.values))
        if paths:
            values["offload"] = {"nvme_paths": list(paths), **values.get("offload", {})}
        for setting in self.settings:
            if setting not in self._of_machine:
                override(values, setting)
        return recipe_from(values, self.whose)

    @property
    def _of_machine(self) -> list[str]:
        return [setting for setting in self.settings if setting.startswith("machine.")]


def recipe_subject(path: Path, settings: Iterable[str] = (), machine: str | None = None) -> Subject:
    """A recipe in a file.

    Raises
    ------
    ConfigError
        If it cannot be read.
    """
    return Subject(values=read_values(path), whose=str(path), machine=machine, settings=tuple(settings))


def model_subject(model: str, training: Mapping[str, Any], *, gradient_checkpointing: bool = False) -> Subject:
    """A model alone.

    Parameters
    ----------
    model : str
        A folder, a name on the hub, or the file of a configuration, *.json.
    training : Mapping[str, Any]
        As in a recipe: `batch_size`, `sequence_length`, `accumulation_steps`. The gradients are clipped.
    """
    source = {"config" if model.endswith(".json") else "name": model}
    if model.endswith(".json") and not Path(model).expanduser().is_file():
        raise ConfigError(f"there is no file {model}")
    values = {
        "model": {**source, "gradient_checkpointing": gradient_checkpointing},
        "data": {"path": "none"},
        "training": {"steps": 1, "max_grad_norm": 1.0, **training},
    }
    return Subject(values=values, whose=model)


def changed_machine(machine: MachineProfile, settings: Iterable[str]) -> MachineProfile:
    """A profile with fields replaced as `machine.key=value` says.

    Raises
    ------
    ConfigError
        If a field is unknown or wrong.
    """
    values = {"machine": machine.model_dump(mode="json", exclude_none=True)}
    for setting in settings:
        override(values, setting)
    changed = values["machine"]
    num_drives, num_machines = changed["drives"], changed.pop("nodes", 1)
    if isinstance(num_drives, int):
        if not 0 <= num_drives <= len(machine.drives):
            raise ConfigError(f"machine.drives={num_drives}: {machine.name} has {len(machine.drives)}")
        changed["drives"] = [drive.model_dump(exclude_none=True) for drive in machine.drives[:num_drives]]
    if not isinstance(num_machines, int):
        raise ConfigError(f"machine.nodes={num_machines}: expected how many machines train together")
    return cluster_of(MachineProfile.from_mapping(changed, f"machine {machine.name}"), num_machines)


def with_drives_of(paths: Iterable[Path], machine: MachineProfile) -> MachineProfile:
    """The machine with the drives that all the paths lie on; as it is if it knows nothing of one of them."""
    mine = [[drive for drive in machine.drives if path.is_relative_to(drive.path)] for path in paths]
    if not all(mine):
        return machine
    used = {drive.path for drives in mine for drive in drives}
    return machine.model_copy(update={"drives": tuple(drive for drive in machine.drives if drive.path in used)})


def planned(recipe: Recipe, planner: Planner | None = None) -> Recipe:
    """The recipe with what its "auto" leaves open filled in, by the profile that is remembered of this machine.

    All ranks of a machine come to the same. Without a profile, on several machines, and for a model that cannot be
    traced, the recipe stays as it is: homes are then host, or what fits.

    Raises
    ------
    BudgetError
        If nothing fits.
    ConfigError
        If a setting cannot work, or `micro_batch_size` is "auto" and cannot be planned.
    """
    needs_plan = recipe.offload.micro_batch_size == "auto"
    if not (needs_plan or recipe.offload.leaves_homes_open):
        return recipe
    remembered = remembered_machine()
    if remembered is None or remembered.foreign or _num_machines() > 1:
        if needs_plan:
            raise ConfigError(
                'micro_batch_size = "auto" is planned from a profile of this machine, one for all ranks: run'
                " zerooffload calibrate, or give a number"
            )
        return recipe
    try:
        plan = (planner or Planner()).plan(recipe, _with_drives_for(recipe, machine_of_run(remembered.profile, recipe)))
    except BudgetError:
        raise
    except Exception as error:
        if needs_plan:
            raise
        _log.warning("homes are not planned: %s: %s", type(error).__name__, error)
        return recipe
    fields = {name: getattr(recipe.offload, name) for name in recipe.offload.model_fields_set}
    return recipe.model_copy(update={"offload": OffloadConfig(**{**fields, **plan.settings})})


def _with_drives_for(recipe: Recipe, machine: MachineProfile) -> MachineProfile:
    """A run uses the drives that its recipe names: of one that was not measured, typical figures do."""
    if not recipe.offload.nvme_paths:
        return machine.model_copy(update={"drives": ()})
    typical = typical_machine(shares_host_memory=machine.device.shares_host_memory)
    return machine.model_copy(update={"drives": machine.drives or typical.drives})


def machine_of_run(machine: MachineProfile, recipe: Recipe) -> MachineProfile:
    """The machine with the ranks and the drives of the run; of several machines, all of them."""
    device = machine.device.model_copy(update={"count": _num_ranks_here()})
    mine = with_drives_of(recipe.offload.nvme_paths, machine.model_copy(update={"device": device}))
    return cluster_of(mine, _num_machines())


def _num_ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _num_machines() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) // _num_ranks_here()


class Planner:
    """Plans recipes. A model is made and traced once for each batch, whatever machine and settings it is asked for."""

    def __init__(self) -> None:
        self._models: dict[str, _PaperModel] = {}

    def plan(self, recipe: Recipe, machine: MachineProfile, *, baseline_bytes: int | None = None) -> Plan:
        """What a run of the recipe will take.

        Parameters
        ----------
        baseline_bytes : int, optional
            Host memory of the process before the run.

        Raises
        ------
        BudgetError
            If it does not fit.
        ConfigError
            If the model, a setting or the profile cannot work as given.
        """
        paper = self.model_of(recipe)
        return plan_model(
            paper.model,
            paper.units,
            lambda batch_size: self.profile(recipe, batch_size),
            recipe.placement,
            machine,
            batch_size=recipe.training.batch_size,
            computed_again=self.computed_again(recipe),
            clips=recipe.training.max_grad_norm is not None,
            baseline_bytes=baseline_bytes,
        )

    def profile(self, recipe: Recipe, batch_size: int) -> ModelProfile:
        """What the recipe's model asks for on a forward of so many sequences.

        Raises
        ------
        ConfigError
            If there is no such model.
        """
        return self.model_of(recipe).profiles.of_batch(batch_size, recipe.training.sequence_length)

    def computed_again(self, recipe: Recipe) -> frozenset[str]:
        """Units whose forward the model itself runs again in backward.

        Raises
        ------
        ConfigError
            If there is no such model.
        """
        if not recipe.model.gradient_checkpointing:
            return frozenset()
        return frozenset(unit.name for unit in self.model_of(recipe).units if unit.is_block)

    def model_of(self, recipe: Recipe) -> _PaperModel:
        """The recipe's model.

        Raises
        ------
        ConfigError
            If there is none such.
        """
        source = replace(model_source(recipe), gradient_checkpointing=False)
        key = repr((source, recipe.offload.units))
        if key not in self._models:
            self._models[key] = _PaperModel(source, recipe)
        return self._models[key]


class _PaperModel:
    """A model without values, and what it asks for.

    Attributes
    ----------
    model : torch.nn.Module
        On the meta device.
    units : Sequence[UnitModules]
    profiles : LanguageModelProfiles
    """

    def __init__(self, source: ModelSource, recipe: Recipe) -> None:
        with torch.device("meta"):
            self.model: nn.Module = build_model(source, model_config(source))
        self.units = find_units(self.model, recipe.offload.units)
        self.profiles = LanguageModelProfiles(source, units=recipe.offload.units)

    @property
    def num_params(self) -> int:
        """Elements; of tied parameters once."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """That most parameters have."""
        numel: Counter[torch.dtype] = Counter()
        for param in self.model.parameters():
            numel[param.dtype] += param.numel()
        return numel.most_common(1)[0][0]
