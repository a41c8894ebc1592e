"""What a step's activations and temporaries will take, found without memory for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerooffload.planner.byteless import StorageTracker, run_without_bytes


@dataclass(frozen=True, kw_only=True)
class ActivationForecast:
    """Bytes beside weights, gradients at rest and optimizer state.

    Attributes
    ----------
    peak_bytes : int
        The most that are alive at the same time in forward and backward.
    saved_bytes : int
        Alive between forward and backward.
    """

    peak_bytes: int
    saved_bytes: int


def predict_activation_bytes(
    build_model: Callable[[], nn.Module],
    run_step: Callable[[nn.Module], torch.Tensor],
    *,
    device: torch.device | str = "cpu",
) -> ActivationForecast:
    """Run forward and backward without memory, and measure what they would take.

    Parameters
    ----------
    build_model : callable
        Makes the model, in the dtype that it computes in, with weights of any value. Nothing is allocated for them.
    run_step : callable
        Runs forward on one (micro-)batch and returns the loss, 0-dim.
    device : torch.device or str
        Where the step will run; it decides which kernels are used.

    Raises
    ------
    RuntimeError
        Whatever torch raises for a model whose way depends on computed floating-point values (routing by experts).
    """
    bytes_of_step = _BytesOfStep()
    run_without_bytes(build_model, run_step, bytes_of_step, device=device)
    return ActivationForecast(peak_bytes=bytes_of_step.tracker.peak_bytes, saved_bytes=bytes_of_step.saved_bytes)


class _BytesOfStep:
    """Watches storages alone."""

    def __init__(self) -> None:
        self.tracker = StorageTracker()
        self.saved_bytes = 0

    def built(self, model: nn.Module) -> None:
        self.tracker.begin(model)

    def ran(self, _func: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        self.tracker.made(result)

    def turned(self) -> None:
        self.saved_bytes = self.tracker.live_bytes
