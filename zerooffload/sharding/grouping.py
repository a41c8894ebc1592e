"""How a model is cut into units.

[Note: units and hook points]
A *unit* owns parameters and is what moves. A *hook point* is a module at whose boundaries something happens; it names
the units whose parameters its forward uses. They differ where weights are tied: a head that shares the embedding's
weight owns nothing, but its hook point needs the embedding's unit. Modules with parameters of the root's unit *stand
by*: they are hook points where the model is entered at one of them, and not at the root (`generate` of an adapter's
wrapper, an encoder called alone).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zerooffload.config import UnitSpec
from zerooffload.errors import ConfigError
from zerooffload.sharding.stored import stored_tensors

# A ModuleList with less than this part of the model's parameters is no list of its blocks.
_BLOCKS_LEAST_PART = 0.1

IsUnit = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class UnitModules:
    """A unit as found: its name (the path of its module; "(root)" for what is left), its hook point, its parameters.

    Attributes
    ----------
    param_names : tuple[tuple[str, ...], ...]
        For each parameter that the unit owns, all its names, the first one first.
    needs : tuple[str, ...]
        Names of the units whose parameters the module's forward uses, its own included.
    standing_by : tuple[tuple[str, torch.nn.Module], ...]
        Of the root: modules whose own parameters are among its unit's.
    is_block : bool
        Whether it is one of the model's blocks: neither an embedding, the head, nor what is left.
    is_head : bool
    """

    name: str
    module: nn.Module
    param_names: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...]
    standing_by: tuple[tuple[str, nn.Module], ...] = ()
    is_block: bool = False
    is_head: bool = False


ROOT_NAME = "(root)"


def modules_around(name: str) -> list[str]:
    """The names of a module and of those that it is in, the outermost first; the model itself is not among them."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def find_units(model: nn.Module, spec: UnitSpec) -> list[UnitModules]:
    """Cut `model` into units, in the order of its modules, the root last.

    Raises
    ------
    ConfigError
        If the model has no parameters, or the given classes, names or callable match no module.
    """
    names_of = _names_by_identity(model)
    if not names_of:
        raise ConfigError(f"the model ({type(model).__name__}) has no parameters: there is nothing to offload")
    points, head = _hook_points(model, spec), _output_embeddings(model)
    owner_of: dict[int, str] = {}
    owned: dict[str, list[tuple[str, ...]]] = {}
    used: dict[str, list[int]] = {}
    for name, module in points.items():
        ids = list(dict.fromkeys(id(param) for _, param in _own_parameters(name, module, points)))
        used[name] = ids
        for key in ids:
            if owner_of.setdefault(key, name) == name:
                owned.setdefault(name, []).append(names_of[key])
    units = [
        UnitModules(
            name,
            module,
            tuple(owned.get(name, ())),
            tuple(dict.fromkeys(owner_of[key] for key in used[name])),
            standing_by=tuple(_standing_by(model, points)) if name == ROOT_NAME else (),
            is_block=name != ROOT_NAME and not isinstance(module, nn.Embedding) and module is not head,
            is_head=module is head,
        )
        for name, module in points.items()
    ]
    return [unit for unit in units if unit.needs or unit.name == ROOT_NAME]


def _hook_points(model: nn.Module, spec: UnitSpec) -> dict[str, nn.Module]:
    is_unit = _predicate(model, spec)
    found = {name: module for name, module in model.named_modules() if name and is_unit(name, module)}
    if not found and spec != "auto":
        raise ConfigError(f"units={spec!r} matches no module of the model; names look like {_example_names(model)}")
    return {**found, ROOT_NAME: model}


def _predicate(model: nn.Module, spec: UnitSpec) -> IsUnit:
    if callable(spec):
        return spec
    if isinstance(spec, list):
        classes = tuple(item for item in spec if isinstance(item, type))
        patterns = [item for item in spec if isinstance(item, str)]
        return lambda name, module: (
            isinstance(module, classes) or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )
    return _automatic(model)


def _automatic(model: nn.Module) -> IsUnit:
    blocks = set(_block_names(model))
    head = _output_embeddings(model)

    def is_unit(name: str, module: nn.Module) -> bool:
        if name in blocks:
            return True
        if blocks.intersection(modules_around(name)):
            return False
        return isinstance(module, nn.Embedding) or module is head

    return is_unit


def _block_names(model: nn.Module) -> Iterator[str]:
    """The elements of the outermost ModuleLists that hold much of the model; without one, of its largest Sequential.

    A list or dictionary in such a list has no forward of its own: its elements stand in its place.
    """
    total = sum(param.numel() for param in model.parameters())
    for kind in (nn.ModuleList, nn.Sequential):
        lists: list[str] = []
        for name, module in model.named_modules():
            nested = any(name.startswith(f"{outer}.") or outer == "" for outer in lists)
            if not isinstance(module, kind) or nested or len(module) < 2:
                continue
            if sum(param.numel() for param in module.parameters()) >= _BLOCKS_LEAST_PART * total:
                lists.append(name)
                yield from _elements(name, module)
        if lists:
            return


def _elements(name: str, module: nn.Module) -> Iterator[str]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _elements(path, child)
        else:
            yield path


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return head if isinstance(head, nn.Module) else None


def _standing_by(model: nn.Module, points: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    inside = tuple(f"{name}." for name in points if name != ROOT_NAME)
    for name, module in model.named_modules():
        is_in_point = name in points or f"{name}.".startswith(inside)
        if name and not is_in_point and next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _own_parameters(name: str, module: nn.Module, points: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters in a hook point's subtree, those of hook points nested in it left out."""
    prefix = "" if name == ROOT_NAME else f"{name}."
    nested = tuple(f"{other}." for other in points if other not in (name, ROOT_NAME) and f"{other}.".startswith(prefix))
    for path, param in stored_tensors(module):
        full = f"{prefix}{path}"
        if not full.startswith(nested):
            yield full, param


def _names_by_identity(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, param in stored_tensors(model):
        names[id(param)] = (*names.get(id(param), ()), name)
    return names


def _example_names(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name][:5]
    return ", ".join(names) or "(none)"
