"""Planning a run of a model on a machine, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from zerooffload.accelerator import cached_block_nbytes, host_buffer_nbytes
from zerooffload.config import OffloadConfig
from zerooffload.planner.find import Request, find_plan
from zerooffload.planner.placement import Reach
from zerooffload.planner.plan import Plan
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.profiles import MachineProfile, ModelProfile
from zerooffload.planner.stages import sharding_of
from zerooffload.runtime.planning import cut


def plan_model(
    model: nn.Module,
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
    return find_plan(
        Request(
            config=config,
            machine=machine,
            batch_size=batch_size,
            profile_of=profile_of,
            problem_of=partial(_problem, model, machine),
            computed_again=computed_again,
            clips=clips,
            baseline_bytes=baseline_bytes,
        )
    )


def _problem(model: nn.Module, machine: MachineProfile, config: OffloadConfig) -> PlacementProblem:
    shares_host = machine.device.shares_host_memory
    _, problem = cut(
        model,
        config,
        Reach(shares_host, host_buffer_nbytes if shares_host else cached_block_nbytes),
        sharding=sharding_of(config.stage),
        world_size=machine.device.count,
        device=torch.device("cpu" if shares_host else "cuda"),
    )
    return problem
