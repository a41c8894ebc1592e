"""The same training twice: in plain PyTorch with the reference optimizer, and offloaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from support.reference_optimizer import ReferenceOptimizer
from support.small_models import MODELS, batch
from torch import nn

import zerooffload as zo
from zerooffload.optim import OPTIMIZERS, reference
from zerooffload.optim.record import OptimizerStates
from zerooffload.runtime.build import Environment, build_run
from zerooffload.runtime.ordinary_calls import make_ordinary_calls_right
from zerooffload.sharding.grouping import find_units
from zerooffload.sharding.layout import FlatLayout, ParamSpec, lay_out
from zerooffload.sharding.local_tensors import is_replicated, local_tensor, tensor_parallel_mesh
from zerooffload.sharding.registry import residence_of
from zerooffload.sharding.stored import stored_tensors

ParamGroups = Iterable[torch.Tensor] | list[dict[str, Any]]


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of a causal language model of transformers."""
    tokens = tokens.to(next(model.parameters()).device)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

    Attributes
    ----------
    build : callable
        Makes the model, with the same values every time.
    loss : callable
        The loss of a model on token ids `[batch, length]`.
    batch : callable
        The token ids of a step and micro-step.
    max_norm : float or None
        Clips by the global norm; None does not clip.
    compute_dtype : str or None
        "bf16", "fp16", or None for the model's own.
    accumulation_steps, algorithm, moments
        Of `OffloadConfig`.
    prepare : callable
        Changes the model before anything else (checkpointing, freezing).
    groups : callable
        What the optimizer is given.
    prepare_offloaded : callable
        Changes the model when it has been offloaded, in plain PyTorch after `prepare`.
    backwards : callable
        What `backward` is called on, one after the other, for a loss that is divided by the number of micro-steps.
    before_step : callable
        Called before gradients are clipped.
    between : callable
        Called after each step with the model and the step's number. What either finds must be equal too.
    schedule : callable or None
        Learning rate factor by step.
    """

    build: Callable[[], nn.Module] = MODELS["llama"]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = language_loss
    batch: Callable[[int, int], torch.Tensor] = batch
    num_steps: int = 20
    num_micro_steps: int = 2
    max_norm: float | None = 1.3
    learning_rate: float = 3e-3
    compute_dtype: str | None = None
    accumulation_steps: int | None = None
    algorithm: str = "adamw"
    moments: str = "fp32"
    prepare: Callable[[nn.Module], None] = lambda _: None
    prepare_offloaded: Callable[[nn.Module], None] = lambda _: None
    backwards: Callable[[torch.Tensor], list[torch.Tensor]] = lambda loss: [loss]
    before_step: Callable[[nn.Module, int], list[float]] = lambda _model, _step: []
    groups: Callable[[nn.Module], ParamGroups] = lambda model: model.parameters()
    between: Callable[[nn.Module, int], list[float]] = lambda _model, _step: []
    schedule: Callable[[int], float] | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.99), "weight_decay": 0.1})


@dataclass
class Outcome:
    """What must be equal, to the bit.

    Attributes
    ----------
    losses, found, norms : list[float]
        Of each micro-step; what the loop found besides; of each step.
    """

    losses: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    report: zo.StepReport | None = field(default=None, compare=False)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What differs, in words; empty if all bits are equal."""
    found = []
    for name in ("losses", "found", "norms"):
        pairs = zip(getattr(one, name), getattr(other, name), strict=True)
        found += [f"{name}[{i}]: {a!r} != {b!r}" for i, (a, b) in enumerate(pairs) if a != b]
    for kind in ("params", "buffers"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        if ours.keys() != theirs.keys():
            found.append(f"{kind}: {sorted(ours.keys() ^ theirs.keys())}")
        for name in ours.keys() & theirs.keys():
            if not torch.equal(ours[name], theirs[name]):
                unequal = int((ours[name] != theirs[name]).sum())
                found.append(f"{name}: {unequal} of {ours[name].numel()} elements differ")
    return found


def train_plain(recipe: Recipe, device: str = "cpu") -> Outcome:
    """Without offloading: torch's own accumulation, the reference optimizer, and its norm."""
    model = prepared(recipe).to(device)
    recipe.prepare_offloaded(model)
    states = OptimizerStates(recipe.algorithm, recipe.moments)
    settings = {"lr": recipe.learning_rate, **recipe.options}
    sums_in_fp32 = (recipe.accumulation_steps or 1) > 1
    optimizer = ReferenceOptimizer(recipe.groups(model), states, sums_in_fp32=sums_in_fp32, **settings)
    optimizer.take_over(model, recipe.compute_dtype, flat_layouts(model, block_numel=states.block_numel))
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    others = [param for param in model.parameters() if id(param) not in updated]

    def clip(max_norm: float) -> float:
        norm = reference_norm(model, states.block_numel, optimizer.gradient)
        optimizer.grad_factor = float(np.float32(min(1.0, max_norm / (norm + 1e-6))))
        for param in others:
            # Nobody reads these with the factor, so they take it at once.
            grad = optimizer.gradient(param)
            if grad is not None:
                grad.mul_(optimizer.grad_factor)
        return norm

    micro_step = partial(_micro_step, recipe, model, lambda: optimizer.take_gradients(model.parameters()))
    outcome = train(recipe, Training(model, optimizer, micro_step, clip))
    outcome.params = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
    return outcome


def train_offloaded(recipe: Recipe, environment: Environment | None = None, **config: Any) -> Outcome:
    """Offloaded, in the real environment or in a simulated one."""
    model = offload_prepared(recipe, environment, **config)
    try:
        optimizer = OPTIMIZERS[recipe.algorithm](recipe.groups(model), lr=recipe.learning_rate, **recipe.options)
        recipe.prepare_offloaded(model)
        micro_step = partial(_micro_step, recipe, model, lambda: None)
        training = Training(model, optimizer, micro_step, lambda norm: float(zo.clip_grad_norm_(model, norm)))
        outcome = train(recipe, training)
        outcome.report = zo.step_report(model)
        outcome.params = current_params(model)
    finally:
        zo.close(model)
    return outcome


def offload_prepared(recipe: Recipe, environment: Environment | None = None, **config: Any) -> nn.Module:
    """A recipe's model, offloaded."""
    model = prepared(recipe)
    defaults = {
        "threads": 1,
        "overwrite": True,
        "compute_dtype": recipe.compute_dtype,
        "accumulation_steps": recipe.accumulation_steps,
        "algorithm": recipe.algorithm,
        "moments": recipe.moments,
    }
    settings = zo.OffloadConfig(**{**defaults, **config})
    if environment is None:
        return zo.offload(model, settings)
    make_ordinary_calls_right(model, build_run(model, settings, environment))
    return model


@contextmanager
def whole(module: nn.Module, *, grads: bool = False) -> Iterator[None]:
    """The parameters of a module to read and to change, offloaded or not."""
    if residence_of(next(module.parameters())) is None:
        yield
    else:
        with zo.full_params(module, grads=grads):
            yield


def current_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of an offloaded model's parameters, module by module, so that the tightest window does."""
    copies: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        leaf = nn.ParameterDict({name.replace(".", "_"): param for name, param in own.items()})
        with zo.full_params(leaf, writeback=False):
            for name, param in own.items():
                copies[f"{prefix}.{name}".lstrip(".")] = param.detach().cpu().clone()
    return {name: copies[name] for name, _ in model.named_parameters()}


def prepared(recipe: Recipe) -> nn.Module:
    """A recipe's model, before it is offloaded."""
    model = recipe.build()
    model.train()
    recipe.prepare(model)
    return model


@dataclass(frozen=True)
class Training:
    """What trains a model by a recipe.

    Attributes
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
    micro_step : callable
        Forward and backward of a step's micro-step; returns the loss, or those of several ranks.
    clip : callable
        Clips the gradients by their norm, which it returns.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro_step: Callable[[int, int], list[float]]
    clip: Callable[[float], float]


def train(recipe: Recipe, training: Training) -> Outcome:
    """All steps; what the parameters are in the end is left to the caller."""
    outcome = Outcome()
    model, optimizer = training.model, training.optimizer
    # For dropout: whatever was drawn before, the numbers from here on are the same.
    torch.manual_seed(0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.schedule) if recipe.schedule else None
    for step in range(recipe.num_steps):
        for micro_step in range(recipe.num_micro_steps):
            outcome.losses += training.micro_step(step, micro_step)
        outcome.found += recipe.before_step(model, step)
        if recipe.max_norm is not None:
            # Ours is returned as fp32, like torch's.
            outcome.norms.append(float(np.float32(training.clip(recipe.max_norm))))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if isinstance(optimizer, ReferenceOptimizer):
            before = [param.detach().clone() for param in model.parameters()]
            outcome.found += recipe.between(model, step)
            optimizer.values_changed_by_hand(model.parameters(), before)
        else:
            outcome.found += recipe.between(model, step)
    outcome.buffers = {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}
    return outcome


def go_back(losses: Sequence[torch.Tensor]) -> Iterator[None]:
    """Through a graph that several losses may share; yields after each backward."""
    *others, last = losses
    for part in others:
        part.backward(retain_graph=True)
        yield
    last.backward()
    yield


def _micro_step(
    recipe: Recipe, model: nn.Module, after_backward: Callable[[], None], step: int, number: int
) -> list[float]:
    loss = recipe.loss(model, recipe.batch(step, number))
    for _ in go_back(recipe.backwards(loss / recipe.num_micro_steps)):
        after_backward()
    return [loss.item()]


def reference_norm(
    model: nn.Module,
    block_numel: int = 1,
    gradient: Callable[[torch.Tensor], torch.Tensor | None] = lambda param: param.grad,
) -> float:
    """The 2-norm of all gradients as the product defines it: sums over blocks of each flat buffer, added exactly."""
    params = dict(model.named_parameters(remove_duplicate=False))
    device = next(model.parameters()).device
    sums: list[float] = []
    for layout in flat_layouts(model, block_numel=block_numel):
        flat = torch.zeros(layout.numel, device=device)
        for slot in layout.slots:
            grad = gradient(params[slot.param.name])
            if grad is not None:
                flat[slot.start : slot.stop] = grad.reshape(-1)
        sums += reference.square_sums(flat).tolist()
    return math.sqrt(math.fsum(sums))


def flat_layouts(
    model: nn.Module, *, trainable: bool | None = True, world_size: int = 1, block_numel: int = 1
) -> Iterator[FlatLayout]:
    """The flat buffers that the model is cut into, by the package's own pure code; all of them with None."""
    params, mesh = dict(stored_tensors(model)), tensor_parallel_mesh(model)
    for unit in find_units(model, "auto"):
        groups: dict[tuple[torch.dtype, bool, bool], list[ParamSpec]] = {}
        for names in unit.param_names:
            param = params[names[0]]
            spec = ParamSpec(names[0], tuple(local_tensor(param).shape), names[1:])
            key = (param.dtype, param.requires_grad, mesh is not None and is_replicated(param))
            groups.setdefault(key, []).append(spec)
        for (dtype, is_trainable, replicated), specs in groups.items():
            if trainable is None or is_trainable == trainable:
                yield lay_out(
                    unit.name,
                    specs,
                    dtype=dtype,
                    trainable=is_trainable,
                    world_size=world_size,
                    block_numel=block_numel,
                    counts=mesh is None or not replicated or mesh.get_local_rank() == 0,
                )
