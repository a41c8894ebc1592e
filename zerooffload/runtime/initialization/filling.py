"""Real values for a meta model's parameters, group by group, and for its buffers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zerooffload.errors import ConfigError
from zerooffload.runtime.initialization.player import Player
from zerooffload.runtime.initialization.recording import Recording, named_tensors
from zerooffload.sharding.local_tensors import is_referred_to
from zerooffload.sharding.placeholders import parameter_placeholder

_log = logging.getLogger("zerooffload")


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no values yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module,
    device: torch.device,
    groups: Iterable[Sequence[nn.Parameter]],
    stored: Collection[str] | None = None,
) -> Iterator[None]:
    """Give values to the parameters of one group after the other, yielding after each, and then to the buffers.

    Parameters keep their identity, class, ties, attributes and hooks. What the caller takes away from a group's
    parameters is not needed any more. Beyond them, memory is taken for one parameter's temporaries and for 1 MiB of
    draws. At the end the generator stands where building the model in memory would have left it.

    Parameters
    ----------
    groups : iterable of sequences of Parameter
        All of the model's parameters, each once.
    stored : collection of str, optional
        Names of parameters and buffers that get their values elsewhere: the former are NaN and take no memory, the
        latter are left alone. If given, the generator is asked for what the others need, and no more.

    Raises
    ------
    ConfigError
        If it is not known how a parameter or a buffer is initialised, or something refers to a parameter in a way that
        would end. The model is untouched then.
    """
    provided = {id(tensor) for name, tensor in named_tensors(model) if name in (stored or ())}
    recording = Recording(model, provided)
    if recording.doubts:
        _log.warning(
            "values made for the meta model may differ from those of a model built in memory with the same seed: %s",
            "; ".join(recording.doubts),
        )
    sources = recording.sources
    player = Player(recording.tape, sources.values(), device, draws_all=stored is None)
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    _check_references(model, layers)
    for group in groups:
        # Not around the yield: what the caller does is its own.
        with torch.no_grad(), _without_weak_references(layers):
            for param in group:
                if not param.is_meta:
                    continue
                if id(param) in provided:
                    _give_values(param, parameter_placeholder(param.shape, param.dtype, device))
                else:
                    _give_values(param, player.tensor(sources[id(param)]))
        yield
    with torch.no_grad():
        shared: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta or id(buffer) in provided:
                    continue
                key = id(buffer)
                if key not in shared:
                    shared[key] = player.tensor(sources[key]).to(buffer.dtype)
                module._buffers[name] = shared[key]
        player.finish()


def _check_references(model: nn.Module, layers: Sequence[nn.RNNBase]) -> None:
    with _without_weak_references(layers):
        for name, param in model.named_parameters():
            if not param.is_meta:
                continue
            if weakref.getweakrefcount(param):
                holder = "something holds a weak reference to"
            elif is_referred_to(param):
                holder = "a graph or view (or its AccumulateGrad node, whose hooks would be lost) holds"
            else:
                continue
            raise ConfigError(
                f"{holder} parameter {name}, which is on the meta device: offload the model before others refer to its"
                " parameters, or build it in memory"
            )


@contextmanager
def _without_weak_references(layers: Sequence[nn.RNNBase]) -> Iterator[None]:
    """Let torch's recurrent layers let go of their parameters: one that is weakly referenced cannot be given values."""
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in layer._flat_weights
            ]


def _give_values(param: nn.Parameter, values: torch.Tensor) -> None:
    real = torch.Tensor._make_subclass(type(param), values.to(param.dtype), param.requires_grad)
    real.__dict__.update(param.__dict__)
    # The dictionaries themselves: who registered a hook may take it away. Autograd learns of them by the assignment.
    real._backward_hooks = param._backward_hooks
    real._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    # Whoever holds the parameter, a tie or an optimizer, keeps holding the right one.
    torch.utils.swap_tensors(param, real)
