"""Which stored tensor is which parameter or buffer of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zerooffload.checkpoint.stored_tensor import Copies, StoredTensor
from zerooffload.errors import CheckpointError

_MOST_SHOWN = 20


@dataclass(frozen=True)
class ModelWeights:
    """Where a model's values are read from.

    Attributes
    ----------
    params, buffers : Mapping[str, StoredTensor]
        By each name that a tensor has in the model.
    missing : tuple[str, ...]
        Parameters and persistent buffers, by their first name, that nothing is stored for.
    unexpected : tuple[str, ...]
        Names of stored tensors that the model has no place for.
    """

    params: Mapping[str, StoredTensor]
    buffers: Mapping[str, StoredTensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(model: nn.Module, stored: Mapping[str, StoredTensor], where: str) -> ModelWeights:
    """Give each tensor of `model` the stored one of its name; `where` begins the messages.

    Raises
    ------
    CheckpointError
        If one has another shape than the model's, or numbers of another kind.
    """
    params, buffers, missing = dict[str, StoredTensor](), dict[str, StoredTensor](), list[str]()
    of_params, of_buffers = (
        _by_identity(model.named_parameters(remove_duplicate=False)),
        _by_identity(persistent_buffers(model, remove_duplicate=False)),
    )
    for found, tensors in ((params, of_params), (buffers, of_buffers)):
        for names, tensor in tensors:
            copies = {name: stored[name] for name in names if name in stored}
            if not copies:
                missing.append(names[0])
                continue
            for name, copy in copies.items():
                _check_alike(name, tensor, copy, where)
            what = f"{where}: {' and '.join(copies)}"
            source = Copies([*copies.values()], what) if len(copies) > 1 else next(iter(copies.values()))
            found.update(dict.fromkeys(names, source))
    return ModelWeights(params, buffers, tuple(missing), tuple(sorted(stored.keys() - params.keys() - buffers.keys())))


def refuse_incomplete(weights: ModelWeights, where: str, advice: str) -> None:
    """See that a model and what is stored for it have the same names.

    Raises
    ------
    CheckpointError
        With the names, if they have not.
    """
    faults = [
        f"{len(names)} {words}: {shortened(names)}"
        for names, words in (
            (weights.missing, "weights of the model are missing"),
            (weights.unexpected, "tensors belong to no weight of the model"),
        )
        if names
    ]
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}. {advice}")


def shortened(names: Collection[str]) -> str:
    """A list of names for a message."""
    shown = ", ".join(name[:200] for name in list(names)[:_MOST_SHOWN])
    return shown if len(names) <= _MOST_SHOWN else f"{shown}, and {len(names) - _MOST_SHOWN} more"


def _by_identity(named: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[list[str], torch.Tensor]]:
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a state dict holds, by name; without `remove_duplicate` those of shared modules under each name."""
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, buffer


def _check_alike(name: str, tensor: torch.Tensor, stored: StoredTensor, where: str) -> None:
    if tuple(tensor.shape) != stored.shape:
        raise CheckpointError(f"{where}: {name} has shape {stored.shape}, the model's has {tuple(tensor.shape)}")
    if tensor.dtype.is_floating_point != stored.dtype.is_floating_point:
        raise CheckpointError(f"{where}: {name} is of {stored.dtype}, the model's of {tensor.dtype}")
