"""Parameters that nobody uses now: an operation on one asks for its values first.

[Note: idle parameters]
A parameter that moves is *idle* while nothing that is under way is known to use its unit, whether its values happen to
be there or not. Its class is then one whose `__torch_function__` sees every operation. What asks for the shape, the
dtype or the gradient goes on; what would read or write values tells the run, which brings them or raises. So a module
may use another one's parameters, and nobody computes with a placeholder. While it is in use, a parameter has its own
class again and nothing stands between it and torch.
"""

from __future__ import annotations

import functools
import types as python_types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerooffload.errors import ConfigError
from zerooffload.sharding.registry import residence_of

_ATTRIBUTES_OF_VALUES = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")),
        *(getattr(torch.Tensor, name).__set__ for name in ("data",)),
    }
)
"""The accessors that give or take values; those of other attributes need none."""
_NEEDS_NO_VALUES = frozenset(
    {
        *("__hash__", "__len__", "__repr__", "is_complex", "is_contiguous", "is_floating_point"),
        *("dim", "element_size", "get_device", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
        *("data_ptr", "untyped_storage"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    }
)


_METHODS_OF_VALUES = ("to_local", "full_tensor", "redistribute")
"""Of a DTensor, in Python, which torch does not tell of."""


class _Idle:
    """Mixed into the class of a tensor while it is idle."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _needs_values(func):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and isinstance(leaf, _Idle):
                    _ask_for_values(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def set_idle(tensors: Iterable[torch.Tensor]) -> None:
    """Watch what is done to these tensors from now on."""
    for tensor in tensors:
        if not isinstance(tensor, _Idle):
            tensor.__class__ = _idle_class(type(tensor))


def set_in_use(tensors: Iterable[torch.Tensor]) -> None:
    """Let torch have these tensors to itself again."""
    for tensor in tensors:
        if isinstance(tensor, _Idle):
            tensor.__class__ = type(tensor).__bases__[1]


@functools.cache
def _idle_class(own: type[torch.Tensor]) -> type[torch.Tensor]:
    watched = {name: _asking_first(getattr(own, name)) for name in _METHODS_OF_VALUES if hasattr(own, name)}
    # A class with the metaclass of `own`, and its name, so that messages read as ever.
    idle: type[torch.Tensor] = python_types.new_class(
        own.__name__, (_Idle, own), exec_body=lambda namespace: namespace.update(watched)
    )
    return idle


def _asking_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def asking_first(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _ask_for_values(tensor)
        return method(tensor, *args, **kwargs)

    return asking_first


def _needs_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func in _ATTRIBUTES_OF_VALUES
    return name not in _NEEDS_NO_VALUES


def _ask_for_values(tensor: torch.Tensor) -> None:
    residence = residence_of(tensor)
    if residence is None:
        raise ConfigError("a parameter was used whose run was ended by zo.close(model): its values are gone")
    residence.run.values_are_wanted(residence)
