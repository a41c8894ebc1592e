"""The public entry: offload a model, and what can be asked of an offloaded one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerooffload.accelerator import Accelerator, default_accelerator
from zerooffload.checkpoint.model_weights import ModelWeights, match, refuse_incomplete
from zerooffload.checkpoint.weights_folder import WeightsFolder
from zerooffload.config import OffloadConfig
from zerooffload.errors import ConfigError
from zerooffload.runtime import dcp_exchange, deepspeed_import
from zerooffload.runtime.build import Environment, build_run, environment, move_buffers
from zerooffload.runtime.ordinary_calls import make_ordinary_calls_right
from zerooffload.runtime.param_access import units_of
from zerooffload.runtime.run import Run
from zerooffload.runtime.saving import SaveTicket
from zerooffload.runtime.sliced_loss import SlicedLoss
from zerooffload.sharding.collectives import (
    Collectives,
    GroupCollectives,
    PartCollectives,
    ReplicatedCollectives,
    SingleRank,
    agree,
)
from zerooffload.sharding.local_tensors import tensor_parallel_mesh
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import Listener, StepReport, TraceFile

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
    collectives = _collectives(process_group)
    if mesh is not None:
        collectives = _of_cuts(collectives, process_group, mesh)
    if pipeline_group is not None:
        collectives = _of_stages(collectives, process_group, mesh, pipeline_group)

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
    return _offload(open_model, config, _collectives(process_group))


def _offload(
    open_model: Callable[[], AbstractContextManager[tuple[M, ModelWeights | None]]],
    config: OffloadConfig | None,
    collectives: Collectives,
) -> M:
    config = config or OffloadConfig()
    env = environment(config, default_accelerator(), collectives)
    with ExitStack() as stack:
        model, weights = agree(collectives, lambda: stack.enter_context(open_model()), "opening the model")
        return offload_in(model, config, env, weights)


def offload_in(model: M, config: OffloadConfig, env: Environment, weights: ModelWeights | None = None) -> M:
    """`offload` in an environment of the caller's."""
    run = build_run(model, config, env, weights)
    make_ordinary_calls_right(model, run)
    return model


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
    return _run_of(params).clip_grad_norm(
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
    with _run_of(model.parameters()).backwards.more_follow():
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
    _run_of(model.parameters()).track(objects)


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
    return _run_of(model.parameters()).resume(optimizers)


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
        Afterwards, remove the oldest checkpoints in `directory`, but for so many.

    Returns
    -------
    SaveTicket
        `wait()` returns when the checkpoint is there, and raises what went wrong; `done()` asks; `path` is its folder.

    Raises
    ------
    ConfigError
        If the model is not offloaded, the directory cannot be used, or `extra` or what is tracked cannot be saved.
    BudgetError
        If the host's budget has no room for what is on its way to the files.
    TierIOError
        If a file cannot be written.
    """
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"keep_last must be at least 1, got {keep_last}")
    run = _run_of(model.parameters())
    return run.save(Path(directory), _as_list(optimizer), extra, keep_last=keep_last, blocking=blocking)


def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> Any:
    """Go on from a checkpoint of `zo.save`: the newest one in `directory`, or the one that is that folder. Collective.

        extra = zo.load("checkpoints", model, optimizer)

    Call it after `offload`, the making of the optimizer and `track`. Every byte is compared with its checksum. Another
    number of ranks, stage, placement or cut into units changes no bit of a state; another compute dtype or format of
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
    return _run_of(model.parameters()).load(Path(directory), _as_list(optimizer))


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
        If the model is not offloaded or in use, is a stage of a pipeline, or the directory cannot be made.
    CheckpointError
        If it cannot be written; nothing of it is left then.
    """
    run = _run_of(model.parameters())
    dcp_exchange.save_dcp(run, model, _as_list(optimizer), run.rule, Path(directory))


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
    run = _run_of(model.parameters())
    dcp_exchange.load_dcp(run, model, _as_list(optimizer), run.rule, Path(directory))


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
    run = _run_of(model.parameters())
    deepspeed_import.load_deepspeed(run, model, Path(directory), moments=bool(_as_list(optimizer)))


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
    return _run_of(model.parameters()).report()


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
    run = _run_of(model.parameters())
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
    with _run_of(model.parameters()).watch(listeners):
        yield


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
    run = _run_of(model.parameters())
    run.release_device()
    move_buffers(model, torch.device("cpu"))


def reclaim_device(model: nn.Module) -> None:
    """Undo `release_device`; harmless on a model that has not left.

    Raises
    ------
    ConfigError
        If the model is not offloaded.
    """
    run = _run_of(model.parameters())
    run.reclaim_device()
    move_buffers(model, run.device)


def close(model: nn.Module) -> None:
    """End a run: give budgets, files and the directory back. Again, or on a model never offloaded, does nothing.

    The files of a run whose steps are committed stay, so that `resume` can continue it. Otherwise values whose home the
    device could not use are gone with it: save the model before.

    Raises
    ------
    TierIOError
        If the last step could not be committed; the run has ended all the same.
    """
    run = _find_run(model.parameters())
    if run is not None:
        run.close()


def _as_list(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _run_of(params: Iterable[torch.Tensor]) -> Run:
    run = _find_run(params)
    if run is None:
        raise ConfigError("the model is not offloaded: call zo.offload(model) first")
    return run


def _find_run(params: Iterable[torch.Tensor]) -> Run | None:
    """Whose run the first is of that has one: some may have come since."""
    residences = (residence_of(param) for param in params)
    residence = next((found for found in residences if found is not None), None)
    return residence.run if residence is not None and isinstance(residence.run, Run) else None


def _collectives(ranks: dist.ProcessGroup | DeviceMesh | None) -> Collectives:
    """Those of the group, of the default group, or of a world of one."""
    if not (dist.is_available() and dist.is_initialized()):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE is {world_size}, but there is no process group:"
                " call torch.distributed.init_process_group() before zo.offload"
            )
        return SingleRank()
    world_size = dist.get_world_size()
    if world_size != int(os.environ.get("WORLD_SIZE", str(world_size))):
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the process group has {world_size} ranks:"
            " start all of them the same way"
        )
    if isinstance(ranks, DeviceMesh) and ranks.ndim > 1:
        return _replicated(ranks)
    group = _group(ranks, "the process group")
    if dist.get_world_size(group) == 1:
        return SingleRank(dist.get_rank())
    return GroupCollectives(group)


def _group(ranks: dist.ProcessGroup | DeviceMesh | None, what: str) -> dist.ProcessGroup:
    """That of a mesh's only dimension, the one given, or the default one; this rank is in it."""
    if isinstance(ranks, DeviceMesh):
        ranks = ranks.get_group()
    group = ranks if ranks is not None else dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigError(f"rank {dist.get_rank()} is not in {what}: call zo.offload on its members alone")
    return group


def _of_stages(
    own: Collectives,
    ranks: dist.ProcessGroup | DeviceMesh | None,
    mesh: DeviceMesh | None,
    stages: dist.ProcessGroup | DeviceMesh,
) -> Collectives:
    """Those of a pipeline's stage, whose `own` collectives are given, and of the other stages.

    It is trained by `ranks`, and cut over `mesh`, if it is cut.
    """
    if ranks is None:
        raise ConfigError(
            "pipeline_group without process_group: all ranks would train the same stage. Hand in the ranks that train"
            ' this one, as in zo.offload(stage, process_group=mesh["dp"], pipeline_group=mesh["pp"])'
        )
    if isinstance(stages, DeviceMesh) and stages.ndim > 1:
        raise ConfigError(f"pipeline_group is {stages}: hand in the dimension of the stages, mesh[name]")
    group = _group(stages, "the pipeline's group")
    for others, what in ((ranks, "process_group"), (mesh, "the mesh over which the model is cut")):
        shared = _shared_ranks(others, group) if others is not None else {dist.get_rank()}
        if shared != {dist.get_rank()}:
            raise ConfigError(
                f"{what} and pipeline_group have ranks {sorted(shared)} in common, expected this one,"
                f" {dist.get_rank()}, alone: a rank trains one stage"
            )
    return own if dist.get_world_size(group) == 1 else PartCollectives(own, GroupCollectives(group))


def _of_cuts(own: Collectives, ranks: dist.ProcessGroup | DeviceMesh | None, mesh: DeviceMesh) -> Collectives:
    """Those of a model that is cut over `mesh`, of which `ranks`, whose `own` collectives are given, have one part."""
    shared = _shared_ranks(ranks or _group(None, "the process group"), mesh)
    if shared != {dist.get_rank()}:
        raise ConfigError(
            f"process_group and the mesh over which the model is cut have ranks {sorted(shared)} in common, expected"
            f" this one, {dist.get_rank()}, alone. Hand in the ranks that have the same part of it, as in"
            ' zo.offload(model, process_group=mesh["dp"]) after parallelize_module(model, mesh["tp"], ...)'
        )
    return own if mesh.size() == 1 else PartCollectives(own, GroupCollectives(mesh.get_group()))


def _shared_ranks(one: dist.ProcessGroup | DeviceMesh, other: dist.ProcessGroup | DeviceMesh) -> set[int]:
    return set(_global_ranks(one)) & set(_global_ranks(other))


def _global_ranks(ranks: dist.ProcessGroup | DeviceMesh) -> list[int]:
    if isinstance(ranks, DeviceMesh):
        members: list[int] = ranks.mesh.flatten().tolist()
        return members
    return dist.get_process_group_ranks(ranks)


def _replicated(mesh: DeviceMesh) -> Collectives:
    """Of a mesh of replicas and shards."""
    if mesh.ndim > 2:
        raise ConfigError(f"{mesh} has {mesh.ndim} dimensions: hand in the two of replicas and shards, mesh[names]")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in {mesh}: call zo.offload on its members alone")
    num_replicas, num_shards = mesh.shape
    if num_shards == 1:
        raise ConfigError(
            f"{mesh} shares a replica among 1 rank, so nothing is sharded: hand in its other dimension, and set"
            " OffloadConfig(stage=0)"
        )
    sharing = mesh.get_group(1)
    if num_replicas == 1:
        return GroupCollectives(sharing)
    everyone = dist.new_group(sorted(mesh.mesh.flatten().tolist()), use_local_synchronization=True)
    return ReplicatedCollectives(
        GroupCollectives(everyone), GroupCollectives(sharing), GroupCollectives(mesh.get_group(0))
    )


__all__ = [
    "clip_grad_norm_",
    "close",
    "full_params",
    "no_sync",
    "offload",
    "reclaim_device",
    "release_device",
    "resume",
    "sliced_loss",
    "step_report",
    "trace",
    "track",
]
