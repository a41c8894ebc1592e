"""Finding the run of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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


def run_of_all_stages(model: nn.Module, call: str) -> Run:
    """The run of a model that is no stage of a pipeline, for `call`, which cannot join them. Collective.

    Raises
    ------
    ConfigError
        If the model is not offloaded, or is one.
    """
    run = run_of(model.parameters())
    # Their class has no stubs.
    cut: Any = next((param for param in model.parameters() if is_distributed(param)), None)
    num_parts = 1 if cut is None else cut.device_mesh.size()
    if len(run.collectives.gather_of_parts(0)) > num_parts:
        raise ConfigError(
            f"{call} cannot join the stages of a pipeline: zo.save can, and zo.load reads what it saved into the whole"
            " model"
        )
    return run
