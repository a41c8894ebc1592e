"""Giving values to a model on the meta device, module by module, so that it never exists whole.

[Note: the same random numbers]
A module's constructor draws its values from torch's generator, in the order in which modules are made. Materializing
calls `reset_parameters` in that order, so the same seed gives what building the model in memory would have given. A
Hugging Face model initialises a second time when its constructor ends, children before parents (`_init_weights`): the
first draws are made and thrown away, because the second ones continue the generator's sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from zerooffload.errors import ConfigError


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter has no values yet."""
    return any(param.is_meta for param in model.parameters())


def materialize(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give values to each module's own parameters and buffers in turn, and yield it.

    Parameters keep their identity, ties and attributes. What the caller takes away from a yielded module's parameters
    is not needed any more.

    Raises
    ------
    ConfigError
        If a module has parameters or buffers on meta and does not say how they are initialised.
    """
    for name, module, initializer in _in_order(model, device):
        if not _has_meta(module):
            yield module
            continue
        _allocate(module, device)
        reset = getattr(module, "reset_parameters", None)
        if initializer is None and reset is None:
            raise ConfigError(
                f"{name or type(model).__name__} ({type(module).__name__}) is on the meta device and has neither"
                " reset_parameters() nor a Hugging Face model around it: define it, or build the model in memory"
            )
        with torch.no_grad():
            if initializer is not None:
                initializer(module)
            elif reset is not None:
                reset()
        yield module


Initializer = Callable[[nn.Module], None]


def _initializer(module: nn.Module) -> Initializer | None:
    """How a Hugging Face model initialises its modules."""
    initialise = getattr(module, "_init_weights", None)
    return initialise if callable(initialise) and hasattr(module, "initialize_weights") else None


Step = tuple[str, nn.Module, Initializer | None]


def _in_order(model: nn.Module, device: torch.device) -> Iterator[Step]:
    if _initializer(model) is None:
        for name, module in model.named_modules():
            yield name, module, None
    else:
        yield from _like_hugging_face("", model, device, set())


def _like_hugging_face(name: str, model: nn.Module, device: torch.device, done: set[nn.Module]) -> Iterator[Step]:
    """As constructors run: a model in the model is complete, initialised twice, before what comes after it is made."""
    for child_name, child in model.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _initializer(child) is not None:
            yield from _like_hugging_face(path, child, device, done)
        else:
            for inner_name, module in child.named_modules(prefix=path):
                if module not in done:
                    _draw_and_discard(inner_name, module, device)
    yield from _children_first(name, model, _initializer(model), done)


def _children_first(
    name: str, module: nn.Module, initializer: Initializer | None, done: set[nn.Module]
) -> Iterator[Step]:
    if module in done:
        return
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child, initializer, done)
    done.add(module)
    yield name, module, initializer


def _has_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Real memory for a module's own parameters and buffers; a tied parameter gets it once."""
    for param in module._parameters.values():
        if param is not None and param.is_meta:
            real = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            real.__dict__.update(param.__dict__)
            # Whoever holds the parameter, a tie or an optimizer, keeps holding the right one.
            torch.utils.swap_tensors(param, real)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _draw_and_discard(name: str, module: nn.Module, device: torch.device) -> None:
    """Take from the generator what the module's constructor would have."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None or not _has_meta(module):
        return
    kept = dict(module._parameters)
    try:
        for key, param in kept.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(torch.empty_like(param, device=device), requires_grad=False)
        reset()
    except NotImplementedError as error:
        raise ConfigError(f"{name} ({type(module).__name__}) cannot be initialised: {error}") from error
    finally:
        module._parameters.update(kept)
