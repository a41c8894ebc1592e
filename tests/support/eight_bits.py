"""A quantized weight that is a tensor of its own kind, as torchao makes them."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only


class EightBits(torch.Tensor):
    """8 bits a number, and a scale a row."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        """Of the dtype that it computes in."""
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __repr__(self) -> str:
        """Without its numbers: torch writes it to its trace while it compiles, when it has none to compute with."""
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """The nearest to a weight."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The tensors that hold its bytes."""
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> Self:
        """The inverse."""
        del context, outer_size, outer_stride
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As a tensor of numbers, but for what keeps it as it is."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            (own,) = args
            # Another dtype is that of what is computed: the codes stay what they are.
            return cls(func(own.codes, **{**kwargs, "dtype": own.codes.dtype}), func(own.scale, **kwargs))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            (own,) = args
            return return_and_correct_aliasing(func, args, kwargs, cls(func(own.codes), func(own.scale)))
        args, kwargs = tree_map_only(cls, lambda own: own.codes.to(own.scale.dtype) * own.scale, (args, kwargs))
        return func(*args, **kwargs)
