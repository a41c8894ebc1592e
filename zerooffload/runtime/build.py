"""Building a run: cut the model, announce the plan, take what it says, hand the parameters over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from zerooffload import native
from zerooffload.accelerator import Accelerator
from zerooffload.aio import Engine, choose_engine, path_speeds
from zerooffload.checkpoint.model_weights import ModelWeights
from zerooffload.checkpoint.stored_tensor import StoredTensor, read_whole
from zerooffload.config import OffloadConfig, TierName, UpdateMode
from zerooffload.errors import ConfigError
from zerooffload.optim.kernels import Kernels, TorchKernels, host_kernels
from zerooffload.planner.admission import AnnouncedPlan, Limits
from zerooffload.planner.placement import (
    FlatPlacement,
    Reach,
    StatePlacement,
    UnitPlacement,
    mirror_holder,
)
from zerooffload.planner.problem import PlacementProblem
from zerooffload.planner.stages import Sharding, sharding_of
from zerooffload.planner.units import lay_out_units, optimizer_states
from zerooffload.runtime.backwards import BackwardCount
from zerooffload.runtime.hook_points import HookPoint
from zerooffload.runtime.initial_states import InitialStates
from zerooffload.runtime.initialization import is_on_meta, materialize
from zerooffload.runtime.micro_batches import slice_blocks
from zerooffload.runtime.planning import plan_together, problem_of
from zerooffload.runtime.resources import Drive, Parts, Resources, limits_of, warn_if_memory_is_short
from zerooffload.runtime.run import Run
from zerooffload.runtime.shared_homes import Sharers, meet_in_memory
from zerooffload.runtime.storage import open_storage
from zerooffload.runtime.update_mode import ModeChooser
from zerooffload.runtime.updating import UpdatePolicy
from zerooffload.sharding.collectives import Collectives, SingleRank, agree
from zerooffload.sharding.flat import Flat
from zerooffload.sharding.grouping import UnitModules, find_units
from zerooffload.sharding.local_tensors import (
    local_tensor,
)
from zerooffload.sharding.registry import register, residence_of
from zerooffload.sharding.stored import is_opaque, stored_tensors
from zerooffload.sharding.unit import Unit, UnitFlat, new_training_states
from zerooffload.telemetry import Waits, process_resident_bytes
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import Block, MirroredBlock, Transfers

_log = logging.getLogger("zerooffload")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a run works with; tests put simulated parts here.

    Attributes
    ----------
    accelerator : Accelerator
    open_engine : callable
        Makes the I/O engine; called only where a state lives on nvme, and for checkpoints.
    make_waits : callable
        Makes the `Waits` for a recorder.
    kernels : Kernels
        For host memory.
    collectives : Collectives
        Of the ranks that share the model.
    commit_in_background : bool
        Whether finished steps are committed by a thread of their own.
    path_speeds : callable
        How fast the drives of the nvme paths are: chunks are spread in proportion.
    """

    accelerator: Accelerator
    open_engine: Callable[[], Engine]
    kernels: Kernels
    commit_in_background: bool = True
    path_speeds: Callable[[Sequence[Path]], list[float]] = path_speeds
    make_waits: Callable[[CountingRecorder], Waits] = Waits
    collectives: Collectives = field(default_factory=SingleRank)


def environment(config: OffloadConfig, accelerator: Accelerator, collectives: Collectives) -> Environment:
    """The real one; tells, once, if it must do without the native module."""
    if not native.available:
        _log.warning(
            "no native module (%s): torch operations and plain Python take its place, with the same numbers but slower",
            native.why_unavailable,
        )
    return Environment(
        accelerator=accelerator,
        open_engine=partial(_open_engine, config, accelerator),
        kernels=host_kernels(config.threads),
        collectives=collectives,
    )


def _open_engine(config: OffloadConfig, accelerator: Accelerator) -> Engine:
    return choose_engine(config.io_engine, next(iter(config.nvme_paths), None), device=accelerator).engine


def build_run(model: nn.Module, config: OffloadConfig, env: Environment, weights: ModelWeights | None = None) -> Run:
    """Offload `model` in place.

    Parameters
    ----------
    weights : ModelWeights, optional
        Values that are read from there, slice by slice, in place of those that the model has.

    Raises
    ------
    ConfigError
        If the model, a setting or a path cannot work as given.
    BudgetError
        If the run does not fit. Nothing is allocated then.
    TierIOError
        If the nvme paths cannot be used. The model is untouched then.
    CheckpointError
        If stored values cannot be read.
    """
    baseline_bytes = process_resident_bytes()
    sharers = _sharers(model, config, env)
    sharding = replace(sharding_of(config.stage, env.collectives.rank), num_sharers=sharers.num_ranks)
    found, problem, limits = agree(env.collectives, lambda: _cut(model, config, env, sharding), "planning")
    params_of = dict(stored_tensors(model))
    plan = plan_together(problem, limits, env.collectives).with_cache()
    warn_if_memory_is_short(plan)
    recorder = CountingRecorder()
    env.collectives.report_to(recorder)
    waits = env.make_waits(recorder)
    parts = Parts(env.accelerator, Transfers(env.accelerator, waits, recorder), waits, recorder)
    storage = open_storage(plan, config, env.collectives)
    _tell_durability(plan, config)
    drive = Drive(env.open_engine, env.path_speeds)
    resources, units = _take_resources_together(
        env.collectives,
        lambda: _with_units(Resources(plan, config, parts, drive, storage, sharers=sharers), plan, params_of, env),
    )
    with ExitStack() as undo:
        undo.callback(resources.close)
        run = Run(
            units=units,
            points=_hook_points(found, units),
            plan=plan,
            states=optimizer_states(config),
            resources=resources,
            parts=parts,
            kernels=(env.kernels, TorchKernels()),
            collectives=env.collectives,
            policy=_update_policy(config, plan),
            baseline_bytes=baseline_bytes,
        )
        undo.callback(run.close)
        continues = storage is not None and storage.record is not None
        states = InitialStates(resources.ring, parts.waits, weights.params if weights else {}, continues=continues)
        # Together: what a rank holds another one may have written.
        agree(
            env.collectives,
            lambda: _hand_over(model, units, states, weights, env.accelerator.device),
            "writing the first states",
        )
        if storage is not None and plan.placement.commits_steps:
            agreement, in_background = env.collectives.agreement(), env.commit_in_background
            agree(
                env.collectives,
                lambda: run.kept.begin(storage, agreement, in_background=in_background),
                "beginning the journal",
            )
        for unit in units:
            register(run, unit)
        run.install()
        slice_blocks(run, found, config, resources, parts)
        undo.pop_all()
    return run


def _sharers(model: nn.Module, config: OffloadConfig, env: Environment) -> Sharers:
    """Ranks that can map one memory, where something may lie there; see [Note: one host copy]."""
    if env.collectives.world_size == 1:
        return Sharers()
    sharding = sharding_of(config.stage)
    holds_whole = not sharding.params and not env.accelerator.shares_host_memory
    may_share = sharding.optimizer or any(not param.requires_grad for _, param in stored_tensors(model))
    return meet_in_memory(env.collectives, wanted=holds_whole and may_share)


def _cut(
    model: nn.Module, config: OffloadConfig, env: Environment, sharding: Sharding
) -> tuple[list[UnitModules], PlacementProblem, Limits]:
    """The units, what is to be placed, and within which limits."""
    _check_model(model)
    accelerator = env.accelerator
    found = find_units(model, config.units)
    world_size, device = env.collectives.world_size, accelerator.device
    layouts = lay_out_units(model, found, config, world_size=world_size, device=device)
    reach = Reach(accelerator.shares_host_memory, accelerator.range_nbytes)
    problem = problem_of(found, layouts, config, reach, sharding=sharding)
    return found, problem, limits_of(config, accelerator)


def _take_resources_together(
    collectives: Collectives, take: Callable[[], tuple[Resources, list[Unit]]]
) -> tuple[Resources, list[Unit]]:
    """On every rank or on none: one that has taken its own gives it back if another could not."""
    taken: list[tuple[Resources, list[Unit]]] = []
    try:
        agree(collectives, lambda: taken.append(take()), "start-up")
    except BaseException:
        for resources, _ in taken:
            resources.close()
        raise
    return taken[0]


def _with_units(
    resources: Resources, plan: AnnouncedPlan, params_of: dict[str, torch.Tensor], env: Environment
) -> tuple[Resources, list[Unit]]:
    """The resources, and the units that lie in them."""
    try:
        units = [_make_unit(unit, params_of, resources, env) for unit in plan.placement.units]
        resources.reserve()
    except BaseException:
        resources.close()
        raise
    return resources, units


def _check_model(model: nn.Module) -> None:
    for name, param in stored_tensors(model):
        if residence_of(param) is not None:
            raise ConfigError(f"the model is offloaded already (parameter {name}): call zo.close(model) first")
        if param.is_meta and is_opaque(param):
            raise ConfigError(f"{name} has no values, and no module could give it any: load a quantized model first")
        tensor = local_tensor(param)
        if not tensor.is_meta and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise ConfigError(f"parameter {name} has no values: it belonged to a run that was closed")
        if param.grad is not None:
            raise ConfigError(f"parameter {name} has a gradient: call model.zero_grad() before zo.offload")


def _update_policy(config: OffloadConfig, plan: AnnouncedPlan) -> UpdatePolicy:
    wanted: UpdateMode | Literal["auto"] = "auto" if config.update == "auto" else UpdateMode(config.update)
    mode = ModeChooser(wanted, plan.placement.update_uses_other_resources)
    return UpdatePolicy(mode, BackwardCount(config.accumulation_steps))


def _make_unit(unit: UnitPlacement, params_of: dict[str, torch.Tensor], resources: Resources, env: Environment) -> Unit:
    return Unit(unit.name, [_make_flat(flat, params_of, resources, env) for flat in unit.flats])


def _make_flat(
    placed: FlatPlacement, params_of: dict[str, torch.Tensor], resources: Resources, env: Environment
) -> UnitFlat:
    accelerator = env.accelerator
    params = [params_of[slot.param.name] for slot in placed.layout.slots]
    # In the order of `FlatPlacement.states`, which is that of a journal's chunks.
    home, training = _allocate(placed.param, resources), None
    if placed.optimizer is not None and placed.gradient is not None:
        training = new_training_states(
            _allocate(placed.optimizer, resources), _allocate(placed.gradient, resources), len(params)
        )
    return UnitFlat(
        flat=Flat(placed.layout, params, accelerator.device),
        home=home,
        training=training,
        range=accelerator.reserve(placed.range_length) if placed.moves else None,
        collection=accelerator.reserve(placed.range_length) if placed.collects else None,
        rank=env.collectives.rank,
        sharers=resources.sharers_of(placed),
    )


def _allocate(state: StatePlacement, resources: Resources) -> Block:
    home: Block
    if state.num_sharers > 1:
        home = resources.share(state)
    else:
        tier = resources.tiers[state.tier]
        home = tier.allocate(state.layout, state.holder, state.kept, name=state.name, num_places=state.num_places)
    if not state.is_mirrored:
        return home
    holder, name = mirror_holder(state.holder), f"copy of {state.name}"
    copies = resources.tiers[TierName.NVME].allocate(state.kept_layout, holder, state.kept, name=name)
    return MirroredBlock(home, copies)


def _tell_durability(plan: AnnouncedPlan, config: OffloadConfig) -> None:
    if plan.placement.commits_steps:
        _log.info("every step is committed on the nvme tier: zo.resume continues after a crash")
    elif config.nvme_paths:
        why = "atomic_steps is off" if not config.atomic_steps else "some trained states live elsewhere: see durable"
        _log.info("this placement resumes from checkpoints only (%s)", why)


def _hook_points(found: Iterable[UnitModules], units: Iterable[Unit]) -> list[HookPoint]:
    by_name = {unit.name: unit for unit in units}
    *points, root = (HookPoint(item.name, item.module, (by_name[name] for name in item.needs)) for item in found)
    standing_by = [
        HookPoint(name, module, root.units, stands_by=True) for item in found for name, module in item.standing_by
    ]
    return [*points, *standing_by, root]


def _hand_over(
    model: nn.Module, units: Sequence[Unit], states: InitialStates, weights: ModelWeights | None, device: torch.device
) -> None:
    """Unit by unit: write the values home, then let the parameters show what they are from now on."""
    for unit in _with_values(model, units, weights):
        for part in unit.parts:
            states.write(part)
            part.flat.convert()
            part.bind()
            part.show_at_home()
    states.finish()
    if weights is not None:
        _read_buffers(model, weights.buffers)
    move_buffers(model, device)


def _read_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    read: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{path}.{key}" if path else key
            if buffer is not None and name in stored:
                if id(buffer) not in read:
                    read[id(buffer)] = read_whole(stored[name]).to(buffer.dtype)
                module._buffers[key] = read[id(buffer)]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Where all of a model's buffers are."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _with_values(model: nn.Module, units: Sequence[Unit], weights: ModelWeights | None) -> Iterator[Unit]:
    """The units, each when its parameters have values, but for those that are stored."""
    if not is_on_meta(model):
        yield from units
        return
    groups = [[param for param in unit.parameters() if isinstance(param, nn.Parameter)] for unit in units]
    stored = None if weights is None else {*weights.params, *weights.buffers}
    filled = materialize(model, torch.device("cpu"), groups, stored)
    for _, unit in zip(filled, units, strict=True):
        yield unit
