"""While a model is initialised on the meta device, its operations go to a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerooffload.errors import ConfigError
from zerooffload.runtime.initialization.tape import Operation, Place, Tape, storage_key, tensors_in

_aten = torch.ops.aten
_UNINITIALISED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_REPLACING = {_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_}
"""In place, and what was there plays no part."""


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Make everything on meta and record it; the generator is as before afterwards."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.device("meta"),
        _Recorder(tape),
        _AsInMemory(),
        _trunc_normal_recorded(tape),
    ):
        yield


class _Recorder(TorchDispatchMode):
    """Records what happens to tensors on meta, and what is drawn."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let an operation happen, and record it if it does more than make views."""
        del types
        named = dict(kwargs or {})
        result = func(*args, **named)
        packet = func.overloadpacket
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if packet in _UNINITIALISED or not (
            draws or any(self._tape.knows(tensor) for tensor in tensors_in((args, named, result)))
        ):
            return result
        given = {storage_key(tensor) for tensor in tensors_in((args, named))}
        made = [None if storage_key(each) in given else self._tape.place(each) for each in tensors_in(result)]
        changed = [self._tape.place(tensor) for tensor in _mutated(func, args, named)]
        if any(made) or changed:
            replaced = changed if packet in _REPLACING else []
            _record(self._tape, func, (args, named), made=made, changed=changed, replaced=replaced, draws=draws)
        return result


def _mutated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _record(
    tape: Tape,
    run: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    made: list[Place | None],
    changed: list[Place],
    replaced: list[Place],
    draws: bool,
) -> None:
    if draws and any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(arguments)):
        raise ConfigError("it draws from a generator of its own")

    def noted(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # A tensor with values, made from numbers of Python's or numpy's, is what it is now.
        return tape.place(leaf) if tape.knows(leaf) else leaf.detach().clone()

    args, kwargs = tree_map(noted, arguments)
    read = {leaf.storage for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Place)}
    tape.append(
        Operation(
            run=run,
            args=args,
            kwargs=kwargs,
            made=made,
            reads=frozenset(read - {place.storage for place in replaced if place.is_whole}),
            writes=[*filter(None, made), *changed],
            draws=draws,
        )
    )


class _AsInMemory(TorchFunctionMode):
    """Let initialisers do on meta what they do in memory, and keep data that is given in Python."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            # Asked by what does nothing on meta, such as some of torch.nn.init.
            return False
        is_data = func in (torch.tensor, torch.as_tensor, torch.asarray) and not tensors_in(args[:1])
        if is_data and named.get("device") is None:
            values = func(*args, **{**named, "device": "cpu"})
            # transformers looks at an empty one to see whether it may skip its work.
            return values.to("meta") if values.numel() else values
        return func(*args, **named)


@contextmanager
def _trunc_normal_recorded(tape: Tape) -> Iterator[None]:
    """Record `trunc_normal_` as one operation.

    It may draw again what is out of bounds: the values decide, and here there are none. Everybody calls it through this
    private name, in torch 2.6 to 2.13; where it is missing, it is recorded like anything else, or fails and is refused.
    """
    drawn = getattr(nn.init, "_no_grad_trunc_normal_", None)
    if drawn is None:
        yield
        return

    def trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        place = tape.place(tensor)
        _record(tape, drawn, ((tensor, *args), kwargs), made=[None], changed=[place], replaced=[place], draws=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal_
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = drawn
