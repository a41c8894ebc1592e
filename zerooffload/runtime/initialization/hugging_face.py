"""How Hugging Face models are initialised."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, cast

from torch import nn

from zerooffload.runtime.initialization.tape import default_dtype


def is_hugging_face(module: nn.Module) -> bool:
    """Whether it is a model of transformers (or made as one)."""
    return callable(getattr(module, "_init_weights", None)) and hasattr(module, "initialize_weights")


def build_again(model: Any) -> nn.Module:
    """What the model's class makes of its config, in the dtype that `from_config` would have used."""
    config = copy.deepcopy(model.config)
    first = next((param.dtype for param in model.parameters() if param.is_floating_point()), None)
    with default_dtype(first) if first and getattr(config, "dtype", None) == first else nullcontext():
        return cast("nn.Module", type(model)(config))


def difference(model: nn.Module, built: nn.Module) -> str:
    """What is not the same in two models, "" if nothing that matters is."""
    for mine, theirs in zip_longest(_described(model), _described(built)):
        if mine != theirs:
            return f"it has {mine or 'nothing more'}, but should have {theirs or 'nothing more'}"
    return ""


def _described(model: nn.Module) -> Iterator[str]:
    first_names: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path or 'the model'} ({type(module).__qualname__})"
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{path}.{key}" if path else key
                first = first_names.setdefault(id(tensor), name)
                tied = f", tied to {first}" if first != name else ""
                yield f"{name} of shape {tuple(tensor.shape)}{tied}"


def initialisers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[[], object]]]:
    """What transformers does for each module, as (module, name of the method, call).

    First what constructors draw, where that is known; then `_init_weights`, of the innermost model.
    """
    for module in _children_first(model):
        if callable(reset := getattr(module, "reset_parameters", None)):
            yield module, "reset_parameters()", reset
    model_of: dict[nn.Module, Any] = {}
    for module in model.modules():
        owner = module if is_hugging_face(module) else model_of[module]
        model_of.update(dict.fromkeys((module, *module.children()), owner))
    for module in _children_first(model):
        yield module, "_init_weights()", partial(model_of[module]._init_weights, module)


def _children_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module
