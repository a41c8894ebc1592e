"""What stands in for a parameter and a gradient whose bytes are elsewhere.

[Note: placeholders]
A parameter that is away has the true shape, dtype and device, so that user code and autograd see what they expect, but
no memory: one NaN, of its own storage (a shared one would make safetensors report all as tied), expanded. A stray read
gives NaN; most stray writes raise in torch, because the elements share memory, and the others are found afterwards.

A gradient that is away is a tensor without storage that raises when any operation touches it. So a foreign optimizer,
`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` fail with our words, where None would let them do nothing in
silence. `None` keeps torch's meaning: no gradient, start afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from zerooffload.errors import ConfigError


def parameter_placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of that shape without memory: NaN everywhere, or zero for a dtype that has no NaN."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # A tensor without dimensions expands to any shape, none included.
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def was_written(placeholder: torch.Tensor) -> bool:
    """Whether a placeholder's one number is another: torch lets `fill_` and `zero_` write to expanded tensors."""
    if not placeholder.is_floating_point():
        return False
    return not bool(placeholder.as_strided((), (), 0).isnan())


class OffloadedGradient(torch.Tensor):
    """`param.grad` while the gradient is held elsewhere: shape, dtype and device, and an error for anything else."""

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> Self:
        """For `param`, whose shape, dtype and device it takes."""
        return torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)

    def __init__(self, param: torch.Tensor) -> None:  # noqa: ARG002 - `__new__` has used it
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse every operation."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise ConfigError(
            f"{func} was called on the gradient of an offloaded parameter, which is held on its tier. Use our"
            " optimizers (zo.AdamW, ...), zo.clip_grad_norm_ and zo.GradScaler in place of torch's, and"
            " zero_grad(set_to_none=True); to read or change gradients: with zo.full_params(module, grads=True)."
        )
