"""Which arguments of a block are cut into slices of the batch, and how arguments and outputs are taken apart. Pure.

[Note: a rule for each argument]
The block's first tensor is its batch: dimension 0 counts samples. Of the others, one whose dimension 0 is not as long
is the same for all samples, for certain. One whose dimension 0 is as long is a part of the batch, unless that length
occurs among the other dimensions of the first tensor too: then it may as well be a sequence, and the user has to say.
What is neither a tensor nor a plain value is refused: it may be written to by each slice.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from fnmatch import fnmatchcase
from typing import Any

import torch

from zerooffload.errors import ConfigError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_PACKED = "cu_seq"


class Rule(StrEnum):
    """What a slice gets of an argument."""

    BATCH = "batch"
    """Its own samples, of dimension 0; all of it where that is 1."""
    SHARED = "shared"
    """All of it."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value in nested arguments or outputs.

    Attributes
    ----------
    path : str
        "position_embeddings[0]".
    """

    path: str
    value: Any

    @property
    def argument(self) -> str:
        """The name that the path begins with."""
        return self.path.split("[", 1)[0].split(".", 1)[0]


Rebuild = Callable[[Iterator[Any]], Any]


def take_apart(value: Any, path: str) -> tuple[list[Leaf], Rebuild]:
    """The leaves of nested tuples, lists, dictionaries and dataclasses, and what puts others in their places.

    The latter does not hold the leaves.
    """
    opened = _open(value)
    if opened is None:
        return [Leaf(path, value)], next
    children, make = opened
    parts = [take_apart(child, path + suffix) for suffix, child in children]
    rebuilds = [rebuild for _, rebuild in parts]
    leaves = [leaf for leaves, _ in parts for leaf in leaves]
    return leaves, lambda values: make([rebuild(values) for rebuild in rebuilds])


def take_arguments_apart(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Leaf], Rebuild]:
    """The leaves of a call's arguments, by the names of `forward`'s parameters; put together they are args, kwargs."""
    names = _positional_names(forward, len(args))
    parts = [take_apart(value, name) for name, value in (*zip(names, args, strict=True), *kwargs.items())]
    rebuilds, num_args, keywords = [rebuild for _, rebuild in parts], len(args), list(kwargs)

    def rebuild(values: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
        built = [one(values) for one in rebuilds]
        return built[:num_args], dict(zip(keywords, built[num_args:], strict=True))

    return [leaf for leaves, _ in parts for leaf in leaves], rebuild


def _open(value: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """The children of a container with what their paths add, and what makes another with others; None for a leaf."""
    kind: Any = type(value)
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, tuple | list):
        children = [(f"[{index}]", item) for index, item in enumerate(value)]
        return children, (lambda items: kind(*items)) if hasattr(value, "_fields") else kind
    if isinstance(value, dict):
        # Also the outputs of transformers, which are dictionaries and dataclasses.
        children, keys = [(f"[{key!r}]", item) for key, item in value.items()], list(value)
        as_dataclass = dataclasses.is_dataclass(value)

        def make_dict(items: list[Any]) -> Any:
            pairs = dict(zip(keys, items, strict=True))
            return kind(**pairs) if as_dataclass else kind(pairs)

        return children, make_dict
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        others = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in names}

        def make_dataclass(items: list[Any]) -> Any:
            made = object.__new__(kind)
            for name, item in (*zip(names, items, strict=True), *others.items()):
                object.__setattr__(made, name, item)
            return made

        return [(f".{name}", getattr(value, name)) for name in names], make_dataclass
    return None


def _positional_names(forward: Callable[..., Any], num_args: int) -> list[str]:
    names: list[str] = []
    for name, param in inspect.signature(forward).parameters.items():
        if param.kind is param.VAR_POSITIONAL:
            names += [f"{name}[{index}]" for index in range(num_args - len(names))]
        elif param.kind is not param.KEYWORD_ONLY and param.kind is not param.VAR_KEYWORD:
            names.append(name)
    if len(names) < num_args:
        raise TypeError(f"forward takes {len(names)} positional arguments, {num_args} were given")
    return names[:num_args]


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is cut.

    Attributes
    ----------
    batch_size : int
    slice_size : int
        Samples of a slice.
    rules : tuple[Rule, ...]
        Of each leaf; of what is no tensor, SHARED.
    """

    batch_size: int
    slice_size: int
    rules: tuple[Rule, ...]

    @property
    def slices(self) -> list[slice]:
        """Of dimension 0."""
        return [slice(start, start + self.slice_size) for start in range(0, self.batch_size, self.slice_size)]


def find_cut(unit: str, leaves: Sequence[Leaf], micro_batch_size: int | None, declared: Mapping[str, Rule]) -> Cut:
    """Find the slices of a call, and the rule of each leaf. See [Note: a rule for each argument].

    Parameters
    ----------
    unit : str
        Name of the block, for `declared` and messages.
    micro_batch_size : int or None
        Samples of a slice; None for one slice.
    declared : Mapping[str, Rule]
        By an argument's name, or by "unit:argument" with an `fnmatch` pattern for the unit.

    Raises
    ------
    ConfigError
        With the argument's name: if there is no batch, if it does not divide, or if an argument's rule is not certain.
    """
    said = [_declared_rule(unit, leaf.argument, declared) for leaf in leaves]
    first = next(
        (
            leaf
            for leaf, rule in zip(leaves, said, strict=True)
            if isinstance(leaf.value, torch.Tensor) and leaf.value.ndim and rule is not Rule.SHARED
        ),
        None,
    )
    if first is None:
        raise ConfigError(f"unit {unit}: no argument is a batch: keep its activations, OffloadConfig(activations=...)")
    batch_size = len(first.value)
    slice_size = micro_batch_size or batch_size
    if batch_size % slice_size or not batch_size:
        raise ConfigError(
            f"unit {unit}: argument {first.path} has {batch_size} samples, which micro_batch_size={slice_size} does not"
            " divide"
        )
    is_whole = batch_size == slice_size
    rules = tuple(_rule(unit, leaf, rule, first, is_whole=is_whole) for leaf, rule in zip(leaves, said, strict=True))
    return Cut(batch_size, slice_size, rules)


def check_declared(declared: Mapping[str, str], units: Sequence[str]) -> None:
    """See that rules for some units alone are for units that there are.

    Raises
    ------
    ConfigError
        If a pattern matches none.
    """
    for key in declared:
        pattern, _, _ = key.rpartition(":")
        if pattern and not any(fnmatchcase(unit, pattern) for unit in units):
            raise ConfigError(
                f"slice_rules for {key!r}: no such unit is sliced; those are {', '.join(units) or 'none'}"
            )


def _declared_rule(unit: str, argument: str, declared: Mapping[str, Rule]) -> Rule | None:
    for key, rule in declared.items():
        pattern, _, name = key.rpartition(":")
        if name == argument and (not pattern or fnmatchcase(unit, pattern)):
            return rule
    return None


def _rule(unit: str, leaf: Leaf, said: Rule | None, first: Leaf, *, is_whole: bool) -> Rule:
    value, batch_size = leaf.value, len(first.value)
    if isinstance(value, _PLAIN) or said is Rule.SHARED:
        return Rule.SHARED
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"unit {unit}: argument {leaf.path} is a {type(value).__name__}, which each slice might change. If it is a"
            " cache, train without it (use_cache=False); if nothing writes to it, say"
            f' OffloadConfig(slice_rules={{"{leaf.argument}": "shared"}})'
        )
    if leaf is first:
        return Rule.BATCH
    length = len(value) if value.ndim else None
    if said is Rule.BATCH and length not in (batch_size, 1):
        raise ConfigError(
            f"unit {unit}: argument {leaf.path} of shape {tuple(value.shape)} is declared as a part of the batch, but"
            f" has neither {batch_size} samples, as {first.path} has, nor 1"
        )
    if said is None and leaf.argument.startswith(_PACKED) and not is_whole:
        raise ConfigError(
            f"unit {unit}: argument {leaf.path} tells where packed sequences end, which slices cannot be cut along:"
            " give the sequences a dimension of their own, or leave micro_batch_size out"
        )
    if length != batch_size or is_whole:
        return Rule.SHARED
    if said is None and batch_size in first.value.shape[1:]:
        raise ConfigError(
            f"unit {unit}: argument {leaf.path} of shape {tuple(value.shape)} may be a part of the batch or not: the"
            f" batch's size, {batch_size}, is that of another dimension of {first.path}, {tuple(first.value.shape)},"
            f' too. Say OffloadConfig(slice_rules={{"{leaf.argument}": "batch"}}) or "shared"'
        )
    return Rule.BATCH
