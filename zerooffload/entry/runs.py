"""Finding the run of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zerooffload.errors import ConfigError
from zerooffload.runtime.run import Run
from zerooffload.sharding.local_tensors import is_distributed
from zerooffload.sharding.registry import residence_of


def run_of(params: Iterable[torch.Tensor]) -> Run:
    """Whose run the first is of that has one.

    Raises
    ------
    ConfigError
        If none has.
    """
    run = find_run(params)
    if run is None:
        raise ConfigError("the model is not offloaded: call zo.offload(model) first")
    return run


def find_run(params: Iterable[torch.Tensor]) -> Run | None:
    """Whose run the first is of that has one, if any: some may have come since."""
    residences = (residence_of(param) for param in params)
    residence = next((found for found in residences if found is not None), None)
    return residence.run if residence is not None and isinstance(residence.run, Run) else None


def run_of_whole(model: nn.Module, call: str) -> Run:
    """The run of a model whose parameters are whole, for `call`, which knows of no others.

    Raises
    ------
    ConfigError
        If the model is not offloaded, or tensor parallelism has cut it.
    """
    if any(is_distributed(param) for param in model.parameters()):
        raise ConfigError(
            f"{call} does not know models that parallelize_module has cut: zo.save does, and zo.load reads what it"
            " saved into one that is whole; torch.distributed.checkpoint saves model.state_dict() and"
            " optimizer.state_dict(), whose values are DTensors"
        )
    return run_of(model.parameters())
