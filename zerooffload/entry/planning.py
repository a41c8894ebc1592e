"""Planning a run of a model on a machine, before anything is allocated."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import nn

from zerooffload.accelerator import cached_block_nbytes, host_buffer_nbytes
from zerooffload.calibration import remembered_machine
from zerooffload.config import MomentFormat, OffloadConfig, TierName
from zerooffload.errors import ConfigError
from zerooffload.planner.find import Request, find_plan
from zerooffload.planner.placement import Reach, UnitLayout
from zerooffload.planner.plan import Plan
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.profiles import MachineProfile, ModelProfile, find_machine, published_machines
from zerooffload.planner.stages import sharding_of
from zerooffload.planner.tracing import trace_model
from zerooffload.planner.units import lay_out_units
from zerooffload.runtime.planning import problem_of
from zerooffload.sharding.grouping import UnitModules, find_units
from zerooffload.sharding.registry import residence_of

_log = logging.getLogger("zerooffload")


def plan(
    model: nn.Module,
    config: OffloadConfig | None = None,
    *,
    run_step: Callable[[nn.Module, int], torch.Tensor],
    batch_size: int,
    sequence_length: int = 1,
    machine: MachineProfile | str | os.PathLike[str] | None = None,
    recomputed: Iterable[str] = (),
    clips: bool = True,
) -> Plan:
    """What training a model on a machine will take, before anything is allocated.

        def run_step(model, batch_size):
            tokens = torch.zeros(batch_size, 2048, dtype=torch.int64)
            return model(input_ids=tokens, labels=tokens).loss

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        plan = zo.plan(model, run_step=run_step, batch_size=4, sequence_length=2048, machine="rtx4090")
        print(plan.explain())

    The model is not run and does not change: a copy of it without bytes is.

    Parameters
    ----------
    model : torch.nn.Module
        Not offloaded yet; best on the meta device.
    config : OffloadConfig, optional
        What is decided already.
    run_step : callable
        Runs forward of a model on a batch of so many samples and returns the loss, 0-dim.
    batch_size : int
        Samples of a forward of one rank.
    sequence_length : int
        Tokens of a sample.
    machine : MachineProfile, str or path, optional
        A profile, its file, or the name of one that comes with the package. Default: what `zerooffload calibrate` has
        left of this machine.
    recomputed : Iterable[str]
        Units that the model itself computes again in backward (checkpoints), by `fnmatch` patterns of their names. Hand
        in the model without its checkpoints.
    clips : bool
        Whether the gradients' norm is wanted.

    Raises
    ------
    BudgetError
        If no choice fits the budgets.
    ConfigError
        If the model, a setting or the machine's profile cannot work as given, or there is no profile.
    """
    if any(residence_of(param) is not None for param in model.parameters()):
        raise ConfigError("the model is offloaded already: plan before zo.offload")
    profile = machine if isinstance(machine, MachineProfile) else machine_for_plans(machine)
    config = config or OffloadConfig()

    @cache
    def profile_of(num_samples: int) -> ModelProfile:
        return trace_model(
            lambda: _without_bytes(model, config.torch_compute_dtype),
            lambda copied: run_step(copied, num_samples),
            units=config.units,
            name=type(model).__name__,
            batch_size=num_samples,
            sequence_length=sequence_length,
        )

    units = find_units(model, config.units)
    return plan_model(
        model,
        units,
        profile_of,
        config,
        profile,
        batch_size=batch_size,
        computed_again=_matching(recomputed, [unit.name for unit in units]),
        clips=clips,
    )


def machine_for_plans(machine: str | os.PathLike[str] | None) -> MachineProfile:
    """The profile of that name or file; by default the one that is remembered of this machine.

    Raises
    ------
    ConfigError
        If there is none, or it is another machine's.
    """
    if machine is not None:
        return find_machine(os.fspath(machine))
    remembered = remembered_machine()
    if remembered is None:
        raise ConfigError(
            "there is no profile of this machine: run zerooffload calibrate, which measures it in a minute, or name"
            f" another machine's ({', '.join(published_machines())}, or a file)"
        )
    if remembered.foreign:
        raise ConfigError(remembered.foreign)
    if remembered.stale:
        _log.warning("%s", remembered.stale)
    return remembered.profile


def plan_model(
    model: nn.Module,
    units: Sequence[UnitModules],
    profile_of: Callable[[int], ModelProfile],
    config: OffloadConfig,
    machine: MachineProfile,
    *,
    batch_size: int,
    computed_again: frozenset[str] = frozenset(),
    clips: bool = True,
    baseline_bytes: int | None = None,
) -> Plan:
    """The plan of a run on all devices of a machine.

    Parameters
    ----------
    model : torch.nn.Module
        Best on the meta device: nothing is made of it.
    units : Sequence[UnitModules]
        What it was cut into.
    profile_of : callable
        What it asks for on a forward of so many samples.
    batch_size : int
        Samples of a forward of one rank.
    computed_again : frozenset[str]
        Units that the model itself computes again in backward.
    clips : bool
        Whether the gradients' norm is wanted.
    baseline_bytes : int, optional
        Host memory of the process before the run.

    Raises
    ------
    BudgetError
        If no choice fits the budgets.
    ConfigError
        If the model, a setting or the machine's profile cannot work as given.
    """
    _check_drives(config, machine)
    return find_plan(
        Request(
            config=config,
            machine=machine,
            batch_size=batch_size,
            profile_of=profile_of,
            problem_of=_Problems(model, machine, units).under,
            computed_again=computed_again,
            clips=clips,
            baseline_bytes=baseline_bytes,
        )
    )


def _check_drives(config: OffloadConfig, machine: MachineProfile) -> None:
    choices = (config.params, config.optimizer, config.gradients, config.activations)
    named = {tier for choice in choices for tier in (choice.values() if isinstance(choice, dict) else (choice,))}
    if not machine.drives and (TierName.NVME in named or config.durable):
        raise ConfigError(
            f"a state has its home on nvme, but the profile of {machine.name} has no drive: measure one"
            " (zerooffload calibrate --path FOLDER), or add [[drives]]"
        )


def _matching(patterns: Iterable[str], units: Sequence[str]) -> frozenset[str]:
    found = set()
    for pattern in patterns:
        names = [name for name in units if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(f"recomputed {pattern!r}: no unit has such a name; units are {', '.join(units)}")
        found.update(names)
    return frozenset(found)


def _without_bytes(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy whose parameters are made anew, in the dtype to compute in, where nothing that is made has bytes."""
    made: dict[int, object] = {}
    for param in model.parameters():
        kind = dtype if dtype is not None and param.is_floating_point() else param.dtype
        made[id(param)] = nn.Parameter(torch.empty(param.shape, dtype=kind), requires_grad=param.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta:
            made[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, made)


class _Problems:
    """What is to be placed of a model, on a rank of a machine, under some settings and others."""

    def __init__(self, model: nn.Module, machine: MachineProfile, units: Sequence[UnitModules]) -> None:
        self._model, self._machine, self._units = model, machine, units
        self._layouts: dict[MomentFormat, list[UnitLayout]] = {}

    def under(self, config: OffloadConfig) -> PlacementProblem:
        """Settings that a plan does not choose are the same each time.

        Raises
        ------
        ConfigError
            If the model or a setting cannot work as given.
        """
        device = self._machine.device
        shares_host = device.shares_host_memory
        return problem_of(
            self._units,
            self._laid_out(config),
            config,
            Reach(shares_host, host_buffer_nbytes if shares_host else cached_block_nbytes),
            # The devices of one machine have a rank each: see [Note: one host copy] in runtime/shared_homes.py.
            sharding=replace(sharding_of(config.stage), num_sharers=max(1, device.count // self._machine.num_machines)),
        )

    def _laid_out(self, config: OffloadConfig) -> list[UnitLayout]:
        # Of what a plan chooses, layouts depend on the moments alone.
        if config.moments not in self._layouts:
            device = self._machine.device
            self._layouts[config.moments] = lay_out_units(
                self._model,
                self._units,
                config,
                world_size=device.count,
                device=torch.device("cpu" if device.shares_host_memory else "cuda"),
            )
        return self._layouts[config.moments]
