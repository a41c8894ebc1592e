"""Offloading a model, and ending it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerooffload.accelerator import default_accelerator
from zerooffload.checkpoint.model_weights import ModelWeights, match, refuse_incomplete
from zerooffload.checkpoint.weights_folder import WeightsFolder
from zerooffload.config import OffloadConfig
from zerooffload.entry.ranks import collectives_of, with_other_cuts, with_other_stages
from zerooffload.entry.runs import find_run, run_of
from zerooffload.errors import ConfigError
from zerooffload.runtime.build import Environment, build_run, environment, move_buffers
from zerooffload.runtime.ordinary_calls import make_ordinary_calls_right
from zerooffload.sharding.collectives import Collectives, agree
from zerooffload.sharding.local_tensors import tensor_parallel_mesh

M = TypeVar("M", bound=nn.Module)


def offload(
    model: M,
    config: OffloadConfig | None = None,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    pipeline_group: dist.ProcessGroup | DeviceMesh | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> M:
    """Move a model's states to their home tiers, in place, and hook the model so that it trains from there.

    Parameters
    ----------
    model : torch.nn.Module
        Without gradients. Parameters may be on the meta device: they are initialised unit by unit. They may be cut over
        a 1D mesh by `parallelize_module`; ranks of that mesh have parts of one model, and norms, loss scales and
        committed steps are those of all parts. Needs `process_group`.
    config : OffloadConfig, optional
        Default: every state on host.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that train the model; default: all. Gradients are averaged over these ranks, and each keeps 1/N of
        every state that the stage shards. Of a 2D mesh, the ranks along the second dimension share a replica of the
        model, and each keeps 1/N of its states, N being that dimension's length; the first dimension counts replicas.
    pipeline_group : ProcessGroup or 1D DeviceMesh, optional
        Where `model` is a stage of a pipeline: this rank and one of each other stage. Gradient norms, loss scales and
        committed steps are then those of all stages, which call `offload`, `clip_grad_norm_`, `resume` and
        `optimizer.step` alike. Needs `process_group`.
    weights : path, optional
        A folder with model.safetensors, or several files and their index: values are read from it, straight to their
        homes, each rank its own. It holds what the model's `state_dict` names, and nothing else.

    Returns
    -------
    torch.nn.Module
        The same module. Its parameters keep their identity, shape and names.

    Raises
    ------
    ConfigError
        If the model, a setting or a path cannot work as given.
    BudgetError
        If the run does not fit the budgets; nothing has been allocated then.
    TierIOError
        If the nvme paths cannot be used.
    CheckpointError
        If the weights cannot be read, or are not those of the model; it must not be used then.
    """
    mesh = tensor_parallel_mesh(model)
    if mesh is not None and weights is not None:
        raise ConfigError("weights of a cut model cannot be read from a folder: load them before parallelize_module")
    collectives = collectives_of(process_group)
    if mesh is not None:
        collectives = with_other_cuts(collectives, process_group, mesh)
    if pipeline_group is not None:
        collectives = with_other_stages(collectives, process_group, mesh, pipeline_group)

    @contextmanager
    def opened() -> Iterator[tuple[M, ModelWeights | None]]:
        if weights is None:
            yield model, None
            return
        with WeightsFolder(Path(weights)) as folder:
            found = match(model, folder.tensors(), str(folder.path))
            refuse_incomplete(found, str(folder.path), "Save it with the names of the model's state_dict()")
            yield model, found

    return _offload(opened, config, collectives)


def offload_opened(
    open_model: Callable[[], AbstractContextManager[tuple[M, ModelWeights | None]]],
    config: OffloadConfig | None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> M:
    """`offload` of a model that `open_model` makes, with the weights that can be read while it is open.

    If a rank cannot make it, all raise.
    """
    return _offload(open_model, config, collectives_of(process_group))


def _offload(
    open_model: Callable[[], AbstractContextManager[tuple[M, ModelWeights | None]]],
    config: OffloadConfig | None,
    collectives: Collectives,
) -> M:
    config = config or OffloadConfig()
    # A rank's environment may force a CPU target that is not there.
    env = agree(collectives, lambda: environment(config, default_accelerator(), collectives), "start-up")
    with ExitStack() as stack:
        model, weights = agree(collectives, lambda: stack.enter_context(open_model()), "opening the model")
        return offload_in(model, config, env, weights)


def offload_in(model: M, config: OffloadConfig, env: Environment, weights: ModelWeights | None = None) -> M:
    """`offload` in an environment of the caller's."""
    run = build_run(model, config, env, weights)
    make_ordinary_calls_right(model, run)
    return model


def release_device(model: nn.Module) -> None:
    """Let another program, or another model, have the device for a while: everything of ours leaves it.

        zo.release_device(trained)
        samples = generate_elsewhere()
        zo.reclaim_device(trained)

    Finishes what is under way, then moves states whose home is the device, and the model's buffers, to host memory and
    gives all leased device memory back. What stays is one element for each parameter, and what the user holds: outputs,
    and graphs that a backward is still to go through. Training goes on with the same bits after `reclaim_device`; until
    then all that uses the model raises `ConfigError`. On a CPU, whose device is host memory, states stay where they
    are.

    Raises
    ------
    ConfigError
        If the model is not offloaded, or is in use: inside of its forward or of `full_params`.
    BudgetError
        If the host's budget has no room for what lives on the device; nothing has moved then.
    TierIOError
        If an update that was under way failed.
    """
    run = run_of(model.parameters())
    run.release_device()
    move_buffers(model, torch.device("cpu"))


def reclaim_device(model: nn.Module) -> None:
    """Undo `release_device`; harmless on a model that has not left.

    Raises
    ------
    ConfigError
        If the model is not offloaded.
    """
    run = run_of(model.parameters())
    run.reclaim_device()
    move_buffers(model, run.device)


def close(model: nn.Module) -> None:
    """End a run: give memory, files and the directory back, now. Again, or on a model never offloaded, does nothing.

    The files of a run whose steps are committed stay, so that `resume` can continue it. Otherwise values whose home the
    device could not use are gone with it: save the model before.

    Raises
    ------
    TierIOError
        If the last step could not be committed; the run has ended all the same.
    """
    run = find_run(model.parameters())
    if run is not None:
        run.close()
