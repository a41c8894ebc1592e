"""The tensors that hold the bytes of a module's parameters.

[Note: opaque bytes]
A parameter may be a tensor of its own kind, made of others: codes and scales of a quantized weight, as torchao makes
them. Torch's protocol for such kinds, `__tensor_flatten__`, names the tensors inside. These move as they are, each in
the dtype that it has; the parameter itself holds nothing and stays. Only frozen ones: an update works on numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerooffload.errors import ConfigError
from zerooffload.sharding.local_tensors import is_distributed


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """For each name of each parameter, the tensors that hold its bytes, with names of their own.

    Raises
    ------
    ConfigError
        If a trainable parameter is made of other tensors.
    """
    for name, param in module.named_parameters(remove_duplicate=False):
        if parts_of(param) and param.requires_grad:
            raise ConfigError(
                f"parameter {name} is a {type(param).__name__}, made of other tensors: it can be offloaded where it is"
                " frozen (requires_grad=False)"
            )
        yield from _inside(name, param)


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a stored tensor is a part of a parameter, whose bytes nobody may convert."""
    return not isinstance(tensor, nn.Parameter)


def parts_of(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a parameter is made of, by attribute; none for an ordinary one, or one that is distributed."""
    if is_distributed(param) or not is_traceable_wrapper_subclass(param):
        return {}
    attributes, _ = param.__tensor_flatten__()
    return {attribute: getattr(param, attribute) for attribute in attributes}


def rebuilt(param: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of the kind of `param`, made of `parts`."""
    _, context = param.__tensor_flatten__()  # type: ignore[attr-defined]
    kind: Any = type(param)
    made: torch.Tensor = kind.__tensor_unflatten__(parts, context, param.shape, param.stride())
    return made


def _inside(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    parts = parts_of(tensor)
    if not parts:
        yield name, tensor
    for attribute, part in parts.items():
        yield from _inside(f"{name}.{attribute}", part)
