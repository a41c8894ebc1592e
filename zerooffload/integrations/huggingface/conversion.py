"""What transformers makes of a checkpoint's tensors when it loads them: other names, experts packed into one tensor.

transformers says it as operations on tensors. They run here on tensors without memory that know where their elements
are stored, so that what comes out can be read slice by slice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from zerooffload.checkpoint.stored_tensor import Joined, Reshaped, Section, StoredTensor
from zerooffload.errors import CheckpointError, ConfigError

_aten = torch.ops.aten


def converted(model: nn.Module, stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint under the names, and in the shapes, that they have in a model of transformers.

    Raises
    ------
    CheckpointError
        If tensors that belong together are not alike.
    ConfigError
        If transformers computes with them on the way.
    """
    try:
        from transformers import conversion_mapping, core_model_loading  # noqa: PLC0415 - an extra
    except ImportError:
        # Before transformers 5 models have the names of their checkpoints, but for a prefix.
        own = model.state_dict()
        return {_with_prefix(model, name, own): tensor for name, tensor in stored.items()}
    return _Conversion(model, conversion_mapping, core_model_loading).of(stored, where)


class _Conversion:
    """As `from_pretrained` does it, with the parts of transformers that know about names and operations."""

    def __init__(self, model: Any, mapping: Any, loading: Any) -> None:
        self._model = model
        self._loading = loading
        self._own = model.state_dict()
        self._transforms = mapping.get_model_conversion_mapping(model)
        self._renamings = [each for each in self._transforms if isinstance(each, loading.WeightRenaming)]
        self._converters = [each for each in self._transforms if isinstance(each, loading.WeightConverter)]
        self._converter_of = {source: each for each in self._converters for source in each.source_patterns}

    def of(self, stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
        """See `converted`."""
        found: dict[str, StoredTensor] = {}
        collected: dict[str, Any] = {}
        # Experts come in the order of their numbers.
        for key in sorted(stored, key=self._loading.dot_natural_key):
            name, pattern = self._new_name(key)
            if pattern is None or name not in self._own:
                self._add(found, {name: stored[key]}, where)
                continue
            collected.setdefault(name, copy.deepcopy(self._converter_of[pattern]))
            collected[name].add_tensor(name, key, pattern, _StandIn(stored[key]))
        for name, converter in collected.items():
            self._add(found, self._made(name, converter, where), where)
        # What saving must undo.
        self._model._weight_conversions = [each for each in self._transforms if each.was_used()]
        return found

    def _new_name(self, key: str) -> tuple[str, str | None]:
        rename = self._loading.rename_source_key
        prefix = self._model.base_model_prefix
        name, pattern = rename(key, self._renamings, self._converters, prefix, self._own)
        if name not in self._own and key in self._own:
            name, pattern = rename(key, [], [], prefix, self._own)
        return name, pattern

    def _made(self, name: str, converter: Any, where: str) -> dict[str, StoredTensor]:
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)
        except (ValueError, RuntimeError, IndexError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{where}: the tensors that make {name} do not fit together: {error}") from error
        tensors = {target: tensor[0] if isinstance(tensor, list) else tensor for target, tensor in made.items()}
        return {target: tensor.stored for target, tensor in tensors.items()}

    @staticmethod
    def _add(found: dict[str, StoredTensor], more: Mapping[str, StoredTensor], where: str) -> None:
        if twice := found.keys() & more.keys():
            raise CheckpointError(f"{where}: several tensors are {min(twice)} of the model")
        found.update(more)


def _with_prefix(model: Any, name: str, own: Mapping[str, Any]) -> str:
    """A name with the base model's prefix, or without it, as the model has it."""
    prefix = f"{model.base_model_prefix}."
    if name in own:
        return name
    return next((each for each in (name.removeprefix(prefix), prefix + name) if each in own), name)


class _StandIn(torch.Tensor):
    """A stored tensor, for code that puts tensors together; it refuses arithmetic.

    Attributes
    ----------
    stored : StoredTensor
    """

    stored: StoredTensor

    @staticmethod
    def __new__(cls, stored: StoredTensor) -> Self:
        """Of its shape and dtype."""
        made = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)
        made.stored = stored
        return made

    def __init__(self, stored: StoredTensor) -> None:  # noqa: ARG002 - `__new__` has used it
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_StandIn(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what moves elements along whole dimensions."""
        make = _OPERATIONS.get(func.overloadpacket)
        if make is None:
            raise ConfigError(
                f"transformers computes with this checkpoint's tensors while it loads them ({func}), which cannot be"
                " done slice by slice: load the model with from_pretrained, and hand it to zo.offload"
            )
        made = make(*args, **(kwargs or {}))
        return [cls(each) for each in made] if isinstance(made, list) else cls(made)


def _cat(tensors: Sequence[_StandIn], dim: int = 0) -> StoredTensor:
    first = tensors[0]
    dim = dim % first.dim()
    for tensor in tensors:
        alike = [(each.dtype, each.shape[:dim], each.shape[dim + 1 :]) for each in (first, tensor)]
        if alike[0] != alike[1]:
            kinds = " and ".join(f"{tuple(each.shape)} of {each.dtype}" for each in (first, tensor))
            raise ValueError(f"{kinds} along dimension {dim}")
    return Joined([tensor.stored for tensor in tensors], dim)


def _stack(tensors: Sequence[_StandIn], dim: int = 0) -> StoredTensor:
    dim = dim % (tensors[0].dim() + 1)
    return _cat([_StandIn(_unsqueeze(tensor, dim)) for tensor in tensors], dim)


def _unsqueeze(tensor: _StandIn, dim: int) -> StoredTensor:
    dim = dim % (tensor.dim() + 1)
    return Reshaped(tensor.stored, (*tensor.shape[:dim], 1, *tensor.shape[dim:]))


def _squeeze(tensor: _StandIn, dim: int) -> StoredTensor:
    dim = dim % tensor.dim()
    shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) if tensor.shape[dim] == 1 else tensor.shape
    return Reshaped(tensor.stored, shape)


def _split(tensor: _StandIn, sizes: int | Sequence[int], dim: int = 0) -> list[StoredTensor]:
    dim = dim % tensor.dim()
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} is not {' + '.join(map(str, sizes))}")
    stops = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [Section(tensor.stored, dim, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _view(tensor: _StandIn, shape: Sequence[int]) -> StoredTensor:
    # Whatever it is made of, it counts as contiguous: its elements are read row by row.
    return Reshaped(tensor.stored, torch.empty(tensor.shape, device="meta").view(*shape).shape)


def _same(tensor: _StandIn, **_: Any) -> StoredTensor:
    return tensor.stored


_OPERATIONS: Mapping[Any, Callable[..., StoredTensor | list[StoredTensor]]] = {
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.unsqueeze: _unsqueeze,
    _aten.squeeze: _squeeze,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.view: _view,
    _aten._unsafe_view: _view,
    _aten.detach: _same,
    _aten.alias: _same,
    _aten.clone: _same,
}
