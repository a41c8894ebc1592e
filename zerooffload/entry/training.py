"""What a training loop asks of an offloaded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerooffload.accelerator import Accelerator, default_accelerator
from zerooffload.entry.runs import run_of
from zerooffload.errors import ConfigError
from zerooffload.runtime.param_access import units_of
from zerooffload.runtime.run import Run
from zerooffload.runtime.sliced_loss import SlicedLoss
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import Listener, StepReport, TraceFile


@contextmanager
def full_params(
    module: nn.Module,
    writeback: bool = True,  # noqa: FBT001, FBT002 - may well be given by position
    *,
    grads: bool = False,
) -> Iterator[None]:
    """The whole parameters of a module, to read or to change.

    Parameters
    ----------
    module : torch.nn.Module
        An offloaded model or a part of it; the units of its parameters must fit the window of parameters in use.
    writeback : bool
        Take edits home at the end. With False, or when the block raises, they are undone.
    grads : bool
        Also show gradients: `param.grad` is then a real tensor, as clipping left it.

    Raises
    ------
    ConfigError
        If a parameter is not offloaded; if steps are committed and one was changed that is frozen.
    BudgetError
        If the parameters, or the copies kept to find edits, do not fit.
    """
    run, units = units_of(module)
    if not isinstance(run, Run):
        raise ConfigError(f"{type(module).__name__} is not offloaded")
    run.kept.check_resumed()
    run.check_on_device()
    with run.access.full(units, writeback=writeback, grads=grads):
        yield


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> torch.Tensor:
    """Clip gradients by their exact global norm over all tiers, ranks, and parts of the model on other ranks.

    The factor `min(1, max_norm / (norm + 1e-6))` is applied when the optimizer reads the gradients.

    Returns
    -------
    torch.Tensor
        The norm before clipping, fp32, 0-dim.

    Raises
    ------
    ConfigError
        If a parameter is not offloaded.
    RuntimeError
        With `error_if_nonfinite`, if the norm is not finite.
    """
    params: list[torch.Tensor]
    if isinstance(model_or_params, nn.Module):
        params = list(model_or_params.parameters())
    elif isinstance(model_or_params, torch.Tensor):
        params = [model_or_params]
    else:
        params = list(model_or_params)
    if not params:
        return torch.zeros(())
    return run_of(params).clip_grad_norm(
        params, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
    )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """More backwards follow before the step: a backward inside is not the last one. May be nested.

        with zo.no_sync(model):
            for batch in batches[:-1]:
                model(batch).backward()
        model(batches[-1]).backward()
        optimizer.step()

    It tells when updates may begin, and changes no number. `OffloadConfig(accumulation_steps=N)` says the same where
    every step has as many backwards, and also lets gradients of 16 bits add up in fp32.

    Unlike that of `DistributedDataParallel`, it saves no communication: every backward reduces its gradients over the
    ranks, because a rank has room for its shard of them only.

    Raises
    ------
    ConfigError
        If the model is not offloaded.
    """
    with run_of(model.parameters()).backwards.more_follow():
        yield


def track(model: nn.Module, **objects: Any) -> None:
    """Commit the state of `objects` with every step, so that `resume` can put it back.

        zo.track(model, scheduler=scheduler, loader=loader)

    The position in the data is taken when `optimizer.step()` is called; the state of schedulers and scalers (objects
    with a `step` method), which loops change after it, when the next training forward begins. The optimizer's settings
    and the random states of torch, numpy, Python and the device are always committed.

    Parameters
    ----------
    **objects
        Anything with `state_dict` and `load_state_dict`. A state may hold numbers, texts, bytes, None, lists, tuples,
        dictionaries, tensors and numpy arrays.

    Raises
    ------
    ConfigError
        If an object has no such methods, a name is taken by another object, or the model is not offloaded.
    """
    run_of(model.parameters()).track(objects)


def resume(model: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """Continue the run that the nvme paths hold from its newest step that every rank has committed.

    Call it after `offload`, the making of the optimizer and `track`, and before training. States, step counts, the
    optimizer's settings, what is tracked and random states are then those of the uninterrupted run at the start of
    the next step. Every chunk is read once, and compared with its checksum.

    Parameters
    ----------
    *optimizers
        All optimizers of the model, in the order in which they were made.

    Returns
    -------
    int
        How many steps are done: 0 if there is nothing to continue.

    Raises
    ------
    ConfigError
        If this placement's steps are not committed; if what is tracked or the optimizers are others; after training.
    CheckpointError
        If files are damaged.
    """
    return run_of(model.parameters()).resume(optimizers)


def sliced_loss(
    head: nn.Module, loss_fn: Callable[..., torch.Tensor], *, micro_batch_size: int | None = None
) -> SlicedLoss:
    """A head and a loss that run in slices of the batch, so that what the head makes of all of it never exists.

        total = zo.sliced_loss(model.head, lambda logits, labels: cross_entropy(logits, labels, reduction="sum"))
        loss = total(hidden, labels) / labels.numel()

    Slices are computed again in backward, as those of blocks are.

    Parameters
    ----------
    head : torch.nn.Module
        Called with `hidden` alone; it must treat each sample for itself.
    loss_fn : callable
        Of what the head returns, and the further arguments: the sum of the loss over its samples, 0-dim.
    micro_batch_size : int, optional
        Samples of a slice. Default: that of the run in which the head is offloaded.

    Returns
    -------
    callable
        `(hidden, *targets, **shared) -> torch.Tensor`, 0-dim: the sum over the batch. Tensors `[batch, ...]` among
        `targets` are cut as `hidden`, `[batch, ...]`, is; `shared` is passed on. It raises `ConfigError` if the batch
        does not divide, or `loss_fn` does not return a sum over samples.

    Raises
    ------
    ConfigError
        If the head is cut by tensor parallelism.
    """

    def setting() -> tuple[Accelerator, int]:
        param = next(head.parameters(), None)
        residence = residence_of(param) if param is not None else None
        run = residence.run if residence is not None and isinstance(residence.run, Run) else None
        size = micro_batch_size or (run.micro_batch_size if run is not None else None)
        if size is None:
            raise ConfigError(
                "zo.sliced_loss does not know how many samples a slice has: say micro_batch_size there or in"
                " OffloadConfig"
            )
        return default_accelerator() if run is None else run.accelerator, size

    return SlicedLoss(head, loss_fn, setting)


def step_report(model: nn.Module) -> StepReport:
    """What the last `optimizer.step()` moved and where it waited.

    Raises
    ------
    ConfigError
        If the model is not offloaded, or no step has finished.
    """
    return run_of(model.parameters()).report()


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str], *, steps: int | None = None) -> Iterator[None]:
    """Write what takes place in a block to a file that ui.perfetto.dev and chrome://tracing show as a timeline.

        with zo.trace(model, "out.json"):
            for batch in loader:
                ...

    It has a lane each for compute, copies in and out, nvme reads and writes, the CPU's update, gathers, reductions, and
    stalls by cause; leased bytes of each tier; and a mark for each step. The file loads at any time, after a crash too.

    Parameters
    ----------
    path : path
        Of rank 0's file, which is overwritten. Other ranks write `out.rank1.json` and so on beside it.
    steps : int, optional
        Stop after so many steps. Default: the whole block is traced; a step takes some hundred bytes a span.

    Raises
    ------
    ConfigError
        If the model is not offloaded or is traced already, or the file cannot be made.
    """
    run = run_of(model.parameters())
    if steps is not None and steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    with TraceFile(Path(path), rank=run.global_rank, steps=steps) as file, run.watch([file]):
        yield


@contextmanager
def watch(model: nn.Module, listeners: Sequence[Listener]) -> Iterator[None]:
    """Hand what takes place in a block to listeners; nothing is recorded if there are none."""
    if not listeners:
        yield
        return
    with run_of(model.parameters()).watch(listeners):
        yield
