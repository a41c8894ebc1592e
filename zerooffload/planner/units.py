"""A model's units as a plan sees them: what lies in which flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerooffload.config import OffloadConfig
from zerooffload.errors import ConfigError
from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.placement import UnitLayout
from zerooffload.sharding.grouping import UnitModules
from zerooffload.sharding.layout import ParamSpec, lay_out
from zerooffload.sharding.local_tensors import (
    check_convertible,
    cut_of,
    is_distributed,
    is_replicated,
    local_tensor,
    tensor_parallel_mesh,
)
from zerooffload.sharding.stored import is_opaque, stored_tensors


def lay_out_units(
    model: nn.Module, found: Sequence[UnitModules], config: OffloadConfig, *, world_size: int, device: torch.device
) -> list[UnitLayout]:
    """Each unit's parameters in flats of one dtype, one `requires_grad`, and one kind under tensor parallelism.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters may be on the meta device.
    world_size : int
        Ranks that share the model.
    device : torch.device
        On which it computes.

    Raises
    ------
    ConfigError
        If a parameter cannot compute there in the dtype that is wanted.
    """
    params_of = dict(stored_tensors(model))
    mesh = tensor_parallel_mesh(model)
    states = optimizer_states(config)
    return [
        UnitLayout(
            unit.name,
            tuple(
                lay_out(
                    f"{unit.name}/{dtype}{'' if trainable else '/frozen'}{'/replicated' if replicated else ''}".replace(
                        "torch.", ""
                    ),
                    specs,
                    dtype=dtype,
                    trainable=trainable,
                    world_size=world_size,
                    block_numel=states.block_numel if trainable else 1,
                    counts=mesh is None or not replicated or mesh.get_local_rank() == 0,
                )
                for (dtype, trainable, replicated), specs in _groups(unit, params_of, config, device, mesh).items()
            ),
            unit.needs,
        )
        for unit in found
    ]


def optimizer_states(config: OffloadConfig) -> OptimizerStates:
    """What the optimizer keeps of each parameter."""
    return OptimizerStates(config.algorithm, config.moments)


def _groups(
    unit: UnitModules,
    params_of: dict[str, torch.Tensor],
    config: OffloadConfig,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> dict[tuple[torch.dtype, bool, bool], list[ParamSpec]]:
    groups: dict[tuple[torch.dtype, bool, bool], list[ParamSpec]] = {}
    for names in unit.param_names:
        param = params_of[names[0]]
        spec = ParamSpec(names[0], tuple(local_tensor(param).shape), names[1:], cut_of(param))
        key = (
            _compute_dtype(spec.name, param, config, device),
            param.requires_grad,
            mesh is not None and is_replicated(param),
        )
        groups.setdefault(key, []).append(spec)
    return groups


def _compute_dtype(name: str, param: torch.Tensor, config: OffloadConfig, device: torch.device) -> torch.dtype:
    convertible = param.is_floating_point() and not is_opaque(param)
    dtype = (config.torch_compute_dtype if convertible else None) or param.dtype
    if is_distributed(param) and param.device.type != device.type:
        raise ConfigError(
            f"parameter {name} is a DTensor on {param.device.type}, and the device is {device.type}:"
            " cut the model over a mesh of that kind"
        )
    if is_distributed(param) and dtype is not param.dtype:
        check_convertible(param, name, dtype)
    return dtype
