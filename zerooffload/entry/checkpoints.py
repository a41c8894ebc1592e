"""Checkpoints: ours, and those of others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerooffload.checkpoint import promotion
from zerooffload.entry.runs import run_of, run_of_all_stages
from zerooffload.errors import ConfigError
from zerooffload.runtime import dcp_exchange, deepspeed_import
from zerooffload.runtime.saving import SaveTicket


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    extra: Any = None,
    *,
    blocking: bool = True,
    keep_last: int | None = None,
) -> SaveTicket:
    """Save a checkpoint: every state, what is tracked, random states, and `extra`. Collective.

        zo.save("checkpoints", model, optimizer, extra={"epoch": 3}, keep_last=2)

    It is a folder of its own in `directory`, there whole or not at all, which `zo.load` reads into any number of ranks
    and any placement. Call it between steps: what belongs to a step is saved as it is now; gradients are not.

    Parameters
    ----------
    directory : path
        Made if it is not there; all ranks must see the same one.
    optimizer : Optimizer or sequence of them
        All optimizers of the model, in the order in which they were made.
    extra : Any
        Numbers, texts, bytes, None, lists, tuples, dictionaries, small tensors and numpy arrays; of each rank.
    blocking : bool
        Return when the checkpoint is there. With False, training goes on meanwhile: what is saved is as it is now all
        the same. A later save, `zo.load` and `zo.close` wait until it is done.
    keep_last : int, optional
        Afterwards, remove the oldest checkpoints in `directory`, but for so many. Of the last one the files stay until
        `zo.close`, for the next save to write over.

    Returns
    -------
    SaveTicket
        `wait()` returns when the checkpoint is there, and raises what went wrong; `done()` asks; `path` is its folder.

    Raises
    ------
    ConfigError
        If the model is not offloaded; if the directory cannot be used, or `extra` or what is tracked cannot be saved.
    BudgetError
        If the host's budget has no room for what is on its way to the files.
    TierIOError
        If a file cannot be written.
    """
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"keep_last must be at least 1, got {keep_last}")
    run = run_of(model.parameters())
    return run.save(Path(directory), _as_list(optimizer), extra, keep_last=keep_last, blocking=blocking)


def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> Any:
    """Go on from a checkpoint of `zo.save`: the newest one in `directory`, or the one that is that folder. Collective.

        extra = zo.load("checkpoints", model, optimizer)

    Call it after `offload`, the making of the optimizer and `track`. Every byte is compared with its checksum. Another
    number of ranks, stage, placement, cut into units or cut by tensor parallelism changes no bit of a state, but for
    8-bit moments of parameters that are cut otherwise, which are rounded once more; another compute dtype or format of
    moments converts it. Of what each rank had for itself, a rank gets that of the rank with its number, else of rank 0.

    Returns
    -------
    Any
        What was given as `extra`.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, it is damaged, or of another model. If it says so while states are written, the run
        cannot go on.
    ConfigError
        If the model is in use, or the optimizers or what is tracked are others.
    BudgetError
        If the host's budget has no room for what is on its way from the files.
    """
    return run_of(model.parameters()).load(Path(directory), _as_list(optimizer))


def promote(
    nvme_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], directory: str | os.PathLike[str]
) -> Path:
    """Make a checkpoint of the last step that a run committed on its nvme paths, without a model, on one process.

        zo.promote("/mnt/nvme", "checkpoints")

    It is one like any other: `zo.load` reads it into any number of ranks and any placement, and gives None as `extra`.
    Every chunk is compared with its checksum. Where both lie on one file system that can (btrfs, xfs), whole pages are
    shared and not written. The run is left as it is, and can be resumed.

    Parameters
    ----------
    nvme_paths : path or sequence of them
        All that the run was given, with the directories of all its ranks.
    directory : path
        For `zo.load`: made if it is not there.

    Returns
    -------
    pathlib.Path
        The checkpoint's folder.

    Raises
    ------
    CheckpointError
        If no run finished a step there, or its files are damaged.
    ConfigError
        If a run uses the paths, ranks are missing or have parts of a model, or the run does not keep what is frozen;
        or if the directory cannot be used.
    TierIOError
        If a file cannot be read or written. No checkpoint is made then.
    """
    paths = [nvme_paths] if isinstance(nvme_paths, str | os.PathLike) else nvme_paths
    return promotion.promote([Path(path) for path in paths], Path(directory))


def save_dcp(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Write a checkpoint that `torch.distributed.checkpoint` loads: for FSDP2, torchtitan and others. Collective.

        zo.save_dcp("for-fsdp2", model, optimizer)

    It holds `model.<name>` in fp32 (what is trained in 16 bits as its exact master) and what
    `torch.distributed.checkpoint.state_dict` calls the optimizer's state, with each parameter's count of steps. States
    pass by in pieces. To save for going on here, use `zo.save`.

    Parameters
    ----------
    directory : path
        New or empty, on a file system that all ranks see. It has its name when all is written.
    optimizer : optional
        Default: the parameters alone.

    Raises
    ------
    ConfigError
        If the model is not offloaded or in use, is a stage of a pipeline, or the directory
        cannot be made.
    CheckpointError
        If it cannot be written; nothing of it is left then.
    """
    run = run_of_all_stages(model, "zo.save_dcp")
    dcp_exchange.save_dcp(run, model, _as_list(optimizer), Path(directory))


def load_dcp(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Take over a checkpoint of `torch.distributed.checkpoint`, however it was sharded. Collective.

        zo.load_dcp("from-fsdp2", model, optimizer)

    Parameters, persistent buffers, moments and step counts are found by the model's names, whatever model and optimizer
    are called in the checkpoint; settings such as the learning rate stay your optimizer's. Only what a piece needs is
    read, and no code of the checkpoint is run.

    Parameters
    ----------
    optimizer : optional
        Default: the parameters alone are taken, and moments begin afresh.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, it is damaged, holds what could run code, or is of another model. If it says so while
        states are written, the run cannot go on.
    ConfigError
        If the model is not offloaded, or in use.
    """
    run = run_of(model.parameters())
    dcp_exchange.load_dcp(run, model, _as_list(optimizer), Path(directory))


def load_deepspeed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Take over a checkpoint of DeepSpeed's ZeRO, stage 1, 2 or 3, of any number of ranks. Collective.

        zo.load_deepspeed("deepspeed-checkpoints", model, optimizer)

    It takes the fp32 masters, frozen parameters, buffers, moments and step counts; settings such as the learning rate
    stay your optimizer's. Only what a piece needs is read, and no code of the checkpoint is run.

    Parameters
    ----------
    directory : path
        What was given to DeepSpeed's `save_checkpoint`, or the folder of a step in it.
    optimizer : optional
        Default: the parameters alone are taken, and moments begin afresh.

    Raises
    ------
    CheckpointError
        If there is no such checkpoint, it is damaged, of another model, or was made with tensor or pipeline
        parallelism. If it says so while states are written, the run cannot go on.
    ConfigError
        If the model is not offloaded, or in use.
    """
    run = run_of(model.parameters())
    deepspeed_import.load_deepspeed(run, model, Path(directory), moments=bool(_as_list(optimizer)))


def _as_list(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
