"""Plans on paper: machines with round figures, and models of which nothing but their cut matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import zerooffload as zo
from zerooffload.accelerator import host_buffer_nbytes
from zerooffload.config import TierName
from zerooffload.planner.admission import Limits
from zerooffload.planner.placement import Reach, UnitLayout, UnitPlacement
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.profiles import (
    DeviceSpeeds,
    Drive,
    HostSpeeds,
    MachineProfile,
    ModelProfile,
    PassWork,
    UnitWork,
)
from zerooffload.planner.stages import STAGE_3, Sharding
from zerooffload.planner.units import lay_out_units
from zerooffload.runtime import planning
from zerooffload.sharding.grouping import find_units

AMPLE = 1 << 40


def machine(*, shares_host: bool = False, **changes: Any) -> MachineProfile:
    """1 GB/s over every link, 1 TFLOP/s, 28 GB/s for an update: a million parameters a millisecond."""
    return MachineProfile(
        name="paper",
        device=DeviceSpeeds(
            memory=AMPLE,
            shares_host_memory=shares_host,
            matmul_flops={"fp32": 1e12},
            memory_bandwidth=1e12,
            operation_seconds=0.0,
            copy_in=1e9,
            copy_out=1e9,
        ),
        host=HostSpeeds(memory=AMPLE, cores=4, memory_bandwidth=1e12, update_bandwidth=2.8e10, checksum_bandwidth=1e12),
        drives=(Drive(path="/paper", read=1e9, write=1e9),),
    ).model_copy(update=changes)


def chain(widths: Sequence[int]) -> nn.Module:
    """Square linear layers, on the meta device; each is a unit, named "0", "1", ..."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


def problem_of(
    model: nn.Module,
    config: zo.OffloadConfig,
    *,
    shares_host: bool = False,
    sharding: Sharding = STAGE_3,
    world_size: int = 1,
) -> PlacementProblem:
    """What is to be placed, on one rank."""
    device = torch.device("cpu" if shares_host else "cuda")
    reach = Reach(shares_host, host_buffer_nbytes)
    units = find_units(model, config.units)
    layouts = lay_out_units(model, units, config, world_size=world_size, device=device)
    return planning.problem_of(units, layouts, config, reach, sharding=sharding)


def profile_of(
    units: Sequence[UnitLayout] | Sequence[UnitPlacement], *, forward: float = 0.0, backward: float = 0.0
) -> ModelProfile:
    """Seconds of compute for each unit but the root, on that machine."""
    works = tuple(
        UnitWork(
            name=unit.name,
            forward=PassWork(flops={"fp32": forward * 1e12 * bool(unit.flats)}),
            backward=PassWork(flops={"fp32": backward * 1e12 * bool(unit.flats)}),
            input_nbytes=0,
            saved_nbytes=0,
            forward_peak_nbytes=0,
            backward_peak_nbytes=0,
        )
        for unit in units
    )
    return ModelProfile(name="paper", batch_size=1, sequence_length=1, units=works, peak_nbytes=0, saved_nbytes=0)


def limits(device: int = AMPLE, host: int = AMPLE, nvme: int = AMPLE, *, shares_host: bool = False) -> Limits:
    """Budgets, without end unless said."""
    return Limits(host if shares_host else device, host, nvme, shares_host)


def all_in(tier: TierName) -> dict[str, Any]:
    """Settings for every state."""
    return {"params": tier.value, "optimizer": tier.value, "gradients": tier.value}
