"""The tensors that hold what a rank has of a model that tensor parallelism has cut.

[Note: tensor parallelism]
`parallelize_module` makes parameters DTensors: every rank of a mesh has a *local tensor*, its part of the parameter
(`Shard`) or a copy of it (`Replicate`). A flat buffer holds local tensors, so whatever moves, counts or updates
elements knows nothing of the cut; what is not a DTensor is its own local tensor. The parameter is what the user and
autograd hold: it has the shape of the whole, the hooks, the gradient and the class, and computes with what its local
tensor shows. A gradient that comes as a sum that is still to be made (`Partial`) is added up over the mesh when
autograd has finished it: the order of these sums is autograd's, as that of the cut model's own collectives is.

Plain parameters of a cut model, and DTensors that are replicated, are the same on all ranks of the mesh, and so are
their gradients. They lie in flat buffers of their own, of which the mesh's first rank alone adds to the model's norm.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerooffload.errors import ConfigError
from zerooffload.sharding.layout import Cut


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, told by what it has: its module takes long to import."""
    return isinstance(getattr(tensor, "device_mesh", None), DeviceMesh)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: the tensor itself, if it is not distributed."""
    # Not `to_local()`, which is watched in a parameter that is idle, and makes another tensor.
    local: torch.Tensor = _any(tensor)._local_tensor if is_distributed(tensor) else tensor
    return local


def local_like(param: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    """What this rank has of `value`, which is cut as `param` is.

    Raises
    ------
    ConfigError
        If it is not cut so; `name` tells what it is.
    """
    cuts = [(each.device_mesh, each.placements) if is_distributed(each) else None for each in map(_any, (param, value))]
    if cuts[0] != cuts[1]:
        raise ConfigError(f"{name} is {_described(value)}, expected {_described(param)}, as its parameter is")
    return local_tensor(value)


def local_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter's gradient, cut as the parameter is. Collective where it is not cut so yet.

    Raises
    ------
    ConfigError
        If the parameter is a DTensor, and the gradient is not.
    """
    if is_distributed(param) and is_distributed(grad):
        grad = _any(grad).redistribute(placements=_any(param).placements)
    return local_like(param, grad, "a gradient")


def distributed_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The tensor of which this rank has `local`, cut as `param` is."""
    if not is_distributed(param):
        return local
    cut = _any(param)
    made: torch.Tensor = cut.from_local(
        local, cut.device_mesh, cut.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made


def convert_distributed(param: torch.Tensor, local: torch.Tensor) -> None:
    """Let a DTensor have `local` in the place of its local tensor, and its dtype. Hooks on it and its values are lost.

    Its identity, ties and attributes stay.
    """
    made = nn.Parameter(distributed_like(param, local), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, made)


def check_convertible(param: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """See that nothing but its owners knows a DTensor that is to be converted.

    Raises
    ------
    ConfigError
        If something does.
    """
    hooks = param._backward_hooks or param._post_accumulate_grad_hooks
    if hooks or weakref.getweakrefcount(param) or is_referred_to(param):
        raise ConfigError(
            f"parameter {name} is a DTensor in {param.dtype} and is to compute in {dtype}, which makes another one of"
            " it, and has hooks, weak references or a graph: offload the model before others refer to its parameters,"
            f" or convert it before, as in model.to({dtype})"
        )


def is_referred_to(param: torch.Tensor) -> bool:
    """Whether a view, a graph, or the node that adds up its gradients holds a parameter."""
    # Its Python object counts as one.
    return int(_any(param)._use_count()) > 1


def is_replicated(param: torch.Tensor) -> bool:
    """Whether every rank of a cut model has all of a parameter."""
    return not is_distributed(param) or all(placement.is_replicate() for placement in _any(param).placements)


def cut_of(param: torch.Tensor) -> Cut | None:
    """Where in a parameter this rank's part lies; None for one of which it has all."""
    if is_replicated(param):
        return None
    (placement,) = _any(param).placements
    offsets = [0] * param.ndim
    offsets[placement.dim] = _range_of(param)[0]
    return Cut(tuple(param.shape), tuple(offsets))


def _range_of(param: torch.Tensor) -> tuple[int, int]:
    """First index and length of this rank's part in the dimension that is cut: `torch.chunk`'s, which may be short."""
    cut = _any(param)
    length, number = param.shape[cut.placements[0].dim], cut.device_mesh.get_local_rank()
    longest = -(-length // cut.device_mesh.size())
    first = min(length, number * longest)
    return first, min(length, first + longest) - first


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which a model is cut; None for one that is whole.

    Raises
    ------
    ConfigError
        If it is cut over several meshes, one of several dimensions or one without this rank; by `fully_shard`; in a
        way that cannot be offloaded; or if a module is compiled that is cut.
    """
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        raise ConfigError(
            "fully_shard has cut the model: hand in the model without it, which OffloadConfig(stage=3) shards over the"
            " ranks of process_group"
        )
    meshes: dict[DeviceMesh, str] = {}
    for name, param in model.named_parameters():
        if is_distributed(param):
            _check_cut(name, _any(param))
            meshes.setdefault(_any(param).device_mesh, name)
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None and any(is_distributed(param) for param in module.parameters()):
            raise ConfigError(
                f"module {name or '(root)'} is cut and compiled, and torch traces no DTensor that is a part of a larger"
                " buffer: compile modules that are not cut"
            )
    if len(meshes) > 1:
        raise ConfigError(
            "the model is cut over several meshes"
            f" ({', '.join(f'{name} over {mesh}' for mesh, name in meshes.items())}): parallelize all of it over one"
        )
    return next(iter(meshes), None)


def _check_cut(name: str, param: Any) -> None:
    mesh, local = param.device_mesh, local_tensor(param)
    if mesh.ndim > 1:
        raise ConfigError(
            f'parameter {name} is cut over {mesh}, of {mesh.ndim} dimensions: expected one, as in mesh["tp"]'
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"parameter {name} is cut over {mesh}, of which this rank is none")
    if any(placement.is_partial() for placement in param.placements):
        raise ConfigError(f"parameter {name} is a sum that is still to be made ({param.placements}): redistribute it")
    if not is_replicated(param):
        (placement,) = param.placements
        expected = (*param.shape[: placement.dim], _range_of(param)[1], *param.shape[placement.dim + 1 :])
        if tuple(local.shape) != expected or type(placement).__name__ != "Shard":
            raise ConfigError(
                f"parameter {name} has a part of shape {list(local.shape)} here, expected {list(expected)}: cut it with"
                " Shard, as distribute_tensor does"
            )
    if local.is_meta:
        raise ConfigError(
            f"parameter {name} is cut and has no values: give it some before zo.offload, as in"
            ' model.to_empty(device="cpu"), and its initialisation'
        )
    if type(local) is not torch.Tensor:
        raise ConfigError(f"parameter {name} is a DTensor of {type(local).__name__}s, which cannot be offloaded")


def _described(tensor: torch.Tensor) -> str:
    if not is_distributed(tensor):
        return "a plain tensor"
    return f"a DTensor {tuple(_any(tensor).placements)} over {_any(tensor).device_mesh}"


def _any(tensor: torch.Tensor) -> Any:
    """A DTensor, for reading what torch's stubs do not know."""
    return tensor
