"""What people do in training loops, as changes of a `Recipe` that any kind of model can take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support.compatible_models import KindOfModel
from support.reference_training import ParamGroups, whole
from support.small_models import batch
from support.training_recipes import generate
from torch import nn
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import checkpoint

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

NUM_STEPS = 4
Prepare = Callable[[nn.Module], None]


@dataclass(frozen=True, kw_only=True)
class KindOfLoop:
    """A row of the table.

    Attributes
    ----------
    changes : callable
        Fields of `Recipe` for a model.
    needs : str
        What a model must have: "blocks", or "language" for one of transformers that can generate; empty for nothing.
    refused : str
        What the error says, if it is refused.
    refused_where_away : bool
        Only where parameters are away from the device.
    refused_with : Mapping[str, str]
        What the error says with a model that other loops go with.
    refused_before_forward : bool
        Before the first one has run; others are refused before the second step's.
    brings_all : bool
        Between steps every rank has all parameters, each brought in the same order.
    holds_more : bool
        Than the least window has room for: units that begin two graphs are in use until both are through.
    takes_long : bool
        With the first model alone, unless all is gone through.
    """

    changes: Callable[[KindOfModel], Mapping[str, Any]]
    needs: str = ""
    refused: str = ""
    refused_where_away: bool = False
    refused_with: Mapping[str, str] = field(default_factory=dict)
    refused_before_forward: bool = False
    brings_all: bool = False
    holds_more: bool = False
    takes_long: bool = False


def each_block(kind: KindOfModel, change: Callable[[nn.Module, str, nn.Module], None]) -> Prepare:
    """Change each block: given the list that it is in, its name there, and itself."""

    def prepare(model: nn.Module) -> None:
        blocks = model.get_submodule(kind.blocks or "")
        for name, block in list(blocks.named_children()):
            change(blocks, name, block)

    return prepare


def checkpoint_inside(_list: nn.Module, _name: str, block: nn.Module, *, use_reentrant: bool) -> None:
    """Of a block's forward, its hooks left outside."""
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=use_reentrant)

    block.forward = checkpointed  # type: ignore[method-assign]


def checkpoint_around(blocks: nn.Module, name: str, block: nn.Module, *, use_reentrant: bool) -> None:
    """Of a call of a block, with its hooks."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(self.block, **kwargs), *args, use_reentrant=use_reentrant)

    setattr(blocks, name, Checkpointed())


def two_groups(model: nn.Module) -> ParamGroups:
    """Matrices and the rest, with rates of their own."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.3},
        {"params": [param for param in params if param.dim() <= 1], "lr": 1e-2, "weight_decay": 0.0},
    ]


def two_losses(loss: torch.Tensor) -> list[torch.Tensor]:
    """Of one forward."""
    return [0.3 * loss, 0.1 * loss.square()]


def two_forwards(kind: KindOfModel) -> Mapping[str, Any]:
    """Both graphs are alive when backward begins."""
    return {"loss": lambda model, tokens: kind.loss(model, tokens) + 0.5 * kind.loss(model, tokens.flip(1))}


def hook_parameters(model: nn.Module) -> None:
    """Change gradients before they are added up."""
    for number, param in enumerate(model.parameters()):
        if param.requires_grad and number % 2:
            param.register_hook(lambda grad: 0.5 * grad)


def watch_gradients(model: nn.Module) -> None:
    """Change gradients when they have been added up."""
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(halve_gradient)


def halve_gradient(param: torch.Tensor) -> None:
    """Of what has been added up."""
    assert param.grad is not None
    param.grad.mul_(0.5)


def hook_modules(model: nn.Module) -> None:
    """All sorts of hooks, which change what passes."""
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _module, args: (args[0] * 1.5, *args[1:]))
            module.register_forward_hook(lambda _module, _args, output: output * 0.5)
            if number % 2:
                module.register_full_backward_hook(
                    lambda _module, grads, _: tuple(grad if grad is None else 0.75 * grad for grad in grads)
                )
            else:
                module.register_full_backward_pre_hook(lambda _module, grads: tuple(1.25 * grad for grad in grads))


def autocast(kind: KindOfModel) -> Mapping[str, Any]:
    """Of forward and loss."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return kind.loss(model, tokens)

    return {"loss": loss}


def evaluate(kind: KindOfModel) -> Mapping[str, Any]:
    """Between steps, without gradients."""

    def between(model: nn.Module, step: int) -> list[float]:
        model.eval()
        with torch.no_grad():
            losses = [kind.loss(model, batch(100 + step, number)).item() for number in range(2)]
        model.train()
        return losses

    return {"between": between}


def leave_device(model: nn.Module, _step: int) -> list[float]:
    """Let others have the device between steps."""
    if residence_of(next(model.parameters())) is not None:
        zo.release_device(model)
        zo.reclaim_device(model)
    return []


def own_parameters(module: nn.Module) -> nn.Module:
    """A module with the parameters that `module` has itself: the least window does not hold those of all in it."""
    return nn.ParameterDict(
        {name.replace(".", "_"): param for name, param in module._parameters.items() if param is not None}
    )


def edit_parameters(model: nn.Module, step: int) -> list[float]:
    """Change values by hand, and read others."""
    found = []
    for module in model.modules():
        own = [param for param in module.parameters(recurse=False) if param.requires_grad and param.numel()]
        if own:
            with whole(own_parameters(module)), torch.no_grad():
                own[step % len(own)].mul_(0.75)
                found.append(own[0].double().sum().item())
    return found


def edit_gradients(model: nn.Module, _step: int) -> list[float]:
    """Change gradients by hand, and read them."""
    found = []
    for module in model.modules():
        if any(param.requires_grad for param in module.parameters(recurse=False)):
            with whole(own_parameters(module), grads=True):
                for param in module.parameters(recurse=False):
                    if param.grad is not None:
                        param.grad.mul_(0.5)
                        found.append(param.grad.double().sum().item())
    return found


def average(model: nn.Module, _step: int) -> list[float]:
    """An exponential moving average of the parameters, beside the model."""
    averages: dict[str, torch.Tensor] = model.__dict__.setdefault("averages", {})
    for prefix, module in model.named_modules():
        own = [(name, param) for name, param in module.named_parameters(recurse=False) if param.requires_grad]
        if own:
            with whole(own_parameters(module)):
                for name, param in own:
                    value = param.detach().double()
                    key = f"{prefix}.{name}"
                    averages[key] = averages[key].lerp(value, 0.1) if key in averages else value
    return [float(value.sum()) for value in averages.values()]


def freeze_in_turn(model: nn.Module, step: int) -> list[float]:
    """Train every other parameter in every other step."""
    for number, param in enumerate(param for param in model.parameters() if hasattr(param, "is_trained")):
        param.requires_grad_((number + step) % 2 == 0)
    return []


def mark_trained(model: nn.Module) -> None:
    """Note what is trained at the beginning."""
    for param in model.parameters():
        if param.requires_grad:
            param.is_trained = True  # type: ignore[attr-defined]


def penalty_outside(kind: KindOfModel) -> Mapping[str, Any]:
    """Of all parameters, added to the loss in the user's loop."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        penalties = [param.float().square().sum() for param in model.parameters() if param.requires_grad]
        return kind.loss(model, tokens) + 1e-3 * torch.stack(penalties).sum()

    return {"loss": loss}


def resize(model: nn.Module) -> None:
    """Give the first embedding or layer another parameter."""
    first = next(module for module in model.modules() if "weight" in module._parameters)
    first.weight = nn.Parameter(torch.zeros(130, *first.weight.shape[1:]))


def _run_traced(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The backend "aot_eager", of which no failure is taken for a reason to run a block as it is."""
    try:
        compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
    except Exception as error:
        raise AssertionError("a block was not compiled") from error
    return compiled


def compile_blocks(kind: KindOfModel, how: str) -> Mapping[str, Any]:
    """With a backend that runs what was traced, which is quick."""

    def change(blocks: nn.Module, name: str, block: nn.Module) -> None:
        if how == "forward":
            block.forward = torch.compile(block.forward, backend=_run_traced)  # type: ignore[method-assign]
        elif how == "compile":
            block.compile(backend=_run_traced)
        else:
            setattr(blocks, name, torch.compile(block, backend=_run_traced))

    return {"prepare": each_block(kind, change)}


def checkpointed(kind: KindOfModel, change: Callable[..., None], *, use_reentrant: bool) -> Mapping[str, Any]:
    """By `torch.utils.checkpoint`, whose reentrant form wants inputs that require gradients."""

    def prepare(model: nn.Module) -> None:
        each_block(kind, partial(change, use_reentrant=use_reentrant))(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and not module.weight.requires_grad:
                module.register_forward_hook(lambda _module, _args, output: output.requires_grad_())

    return {"prepare": prepare}


def unchanging(**changes: Any) -> Callable[[KindOfModel], Mapping[str, Any]]:
    """The same for each model."""
    return lambda _kind: changes


_CALLED_TWICE = {"branches": "got two gradients in one backward, because reentrant checkpoints share it"}

LOOPS: dict[str, KindOfLoop] = {
    "two micro-steps, clipping": KindOfLoop(changes=unchanging()),
    "one micro-step, no clipping": KindOfLoop(changes=unchanging(num_micro_steps=1, max_norm=None)),
    "param groups, schedule": KindOfLoop(changes=unchanging(groups=two_groups, schedule=lambda step: 0.8**step)),
    "two backwards through one graph": KindOfLoop(changes=unchanging(backwards=two_losses)),
    "two forwards, one backward": KindOfLoop(changes=two_forwards, holds_more=True),
    "checkpoint in blocks": KindOfLoop(
        changes=partial(checkpointed, change=checkpoint_inside, use_reentrant=False), needs="blocks"
    ),
    "checkpoint around blocks": KindOfLoop(
        changes=partial(checkpointed, change=checkpoint_around, use_reentrant=False), needs="blocks"
    ),
    "reentrant checkpoint in blocks": KindOfLoop(
        changes=partial(checkpointed, change=checkpoint_inside, use_reentrant=True),
        needs="blocks",
        refused_with=_CALLED_TWICE,
    ),
    "reentrant checkpoint around blocks": KindOfLoop(
        changes=partial(checkpointed, change=checkpoint_around, use_reentrant=True),
        needs="blocks",
        refused_with=_CALLED_TWICE,
    ),
    "hooks on parameters": KindOfLoop(changes=unchanging(prepare=hook_parameters)),
    "hooks on parameters, after `offload`": KindOfLoop(changes=unchanging(prepare_offloaded=hook_parameters)),
    "post-accumulate hooks, one micro-step": KindOfLoop(changes=unchanging(prepare=watch_gradients, num_micro_steps=1)),
    "post-accumulate hooks": KindOfLoop(
        changes=unchanging(prepare=watch_gradients), refused="has a post-accumulate hook, which would see"
    ),
    "post-accumulate hooks, after `offload`": KindOfLoop(
        changes=unchanging(prepare_offloaded=watch_gradients),
        refused="was called on the gradient of an offloaded parameter",
    ),
    "hooks on modules": KindOfLoop(changes=unchanging(prepare=hook_modules)),
    "hooks on modules, after `offload`": KindOfLoop(changes=unchanging(prepare_offloaded=hook_modules)),
    "compiled forward of blocks": KindOfLoop(
        changes=partial(compile_blocks, how="forward"), needs="blocks", takes_long=True
    ),
    "compiled blocks, in place": KindOfLoop(
        changes=partial(compile_blocks, how="compile"), needs="blocks", takes_long=True
    ),
    "compiled blocks, wrapped": KindOfLoop(
        changes=partial(compile_blocks, how="wrapped"), needs="blocks", takes_long=True
    ),
    "autocast to bf16": KindOfLoop(changes=autocast),
    "evaluation": KindOfLoop(changes=evaluate, brings_all=True),
    "generation with a cache": KindOfLoop(changes=unchanging(between=generate), needs="language"),
    "device released and reclaimed": KindOfLoop(changes=unchanging(between=leave_device)),
    "parameters edited": KindOfLoop(changes=unchanging(between=edit_parameters), brings_all=True),
    "gradients edited": KindOfLoop(changes=unchanging(before_step=edit_gradients)),
    "moving average": KindOfLoop(changes=unchanging(between=average), brings_all=True),
    "frozen in turn": KindOfLoop(changes=unchanging(prepare=mark_trained, between=freeze_in_turn)),
    "penalty in the loop": KindOfLoop(
        changes=penalty_outside,
        refused="was used outside of the model's forward",
        refused_where_away=True,
        refused_before_forward=True,
    ),
    "`copy.deepcopy` of the model": KindOfLoop(
        changes=unchanging(between=lambda model, _: [float(copy.deepcopy(model) is None)]),
        refused="copy.deepcopy does not work on an offloaded model",
    ),
    "torch's clip_grad_norm_": KindOfLoop(
        changes=unchanging(before_step=lambda model, _: [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))]),
        refused="was called on the gradient of an offloaded parameter",
    ),
    "parameter replaced after `offload`": KindOfLoop(
        changes=unchanging(prepare_offloaded=resize),
        refused="parameters were replaced, added or taken away after zo.offload",
        refused_before_forward=True,
    ),
}
