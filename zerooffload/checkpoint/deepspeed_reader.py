"""Checkpoints of DeepSpeed's ZeRO, read piece by piece.

[Note: DeepSpeed's partitions]
Stages 1 and 2 lay the parameters of a group out one after the other and cut that vector by ranks: what the ranks hold,
joined in their order, is the vector. Stage 3 cuts each parameter by ranks, `ceil(numel / ranks)` elements each, the
last ones padded; a rank holds its pieces of all parameters one after the other, in several vectors that together are
one. Moments lie as the fp32 values do. https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from zerooffload.checkpoint.torch_file import Inert, OpenFiles, PickledTensor, read_torch_file
from zerooffload.errors import CheckpointError

VALUES = "values"
"""The state that is the parameter itself."""

_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(optim|model)_states\.pt")
_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Vector:
    """Tensors, 1D, as one."""

    tensors: tuple[PickledTensor, ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[PickledTensor]) -> _Vector:
        return _Vector(tuple(tensors), tuple(accumulate(tensor.numel for tensor in tensors)))

    def pieces(self, first: int, numel: int) -> Iterator[tuple[PickledTensor, int, int]]:
        """The tensors that hold elements, with the first element in each, and how many."""
        number = bisect_right(self.ends, first)
        while numel and number < len(self.tensors):
            tensor = self.tensors[number]
            inside = first - (self.ends[number] - tensor.numel)
            count = min(numel, tensor.numel - inside)
            yield tensor, inside, count
            first, numel, number = first + count, numel - count, number + 1


@dataclass(frozen=True)
class _Place:
    """Elements `[start, stop)` of a parameter lie in a vector, from `first` on."""

    start: int
    stop: int
    vector: int
    first: int


@dataclass
class _Found:
    """What a checkpoint holds; vectors by state and number, step counts by vector and tensor in it."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    places: dict[str, list[_Place]] = field(default_factory=dict)
    vectors: dict[str, dict[int, _Vector]] = field(default_factory=dict)
    steps: dict[int, list[Any]] = field(default_factory=dict)
    frozen: dict[str, list[PickledTensor]] = field(default_factory=dict)


class DeepSpeedReader:
    """A checkpoint of ZeRO-1, 2 or 3, open for reading; a context manager.

    Attributes
    ----------
    path : pathlib.Path
        The folder of the step.
    shapes : Mapping[str, tuple[int, ...]]
        Of parameters, trained and frozen, by name; those that share memory under each name.
    states : frozenset[str]
        `VALUES`, and what the optimizer keeps, by torch's names.
    buffers : Mapping[str, PickledTensor]

    Raises
    ------
    CheckpointError
        If there is none, it is damaged, or was made with tensor or pipeline parallelism.
    """

    def __init__(self, directory: Path) -> None:
        self.path = _step_folder(directory)
        self._files = OpenFiles()
        try:
            self._found, self.buffers = _find(self.path)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} holds no checkpoint of ZeRO that can be read: {error!r:.300}"
            ) from error
        self.shapes: Mapping[str, tuple[int, ...]] = self._found.shapes
        self.states = frozenset(self._found.vectors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._files.close()

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer had it."""
        return name in self._found.places

    def read(self, name: str, state: str, start: int, stop: int) -> torch.Tensor:
        """The elements `[start, stop)` of a parameter's state, counted row by row: 1D, in host memory.

        Raises
        ------
        CheckpointError
            If some are not there.
        """
        if name in self._found.frozen:
            vector = _Vector.of(self._found.frozen[name])
            return self._join([vector.pieces(start, stop - start)], stop - start, name)
        pieces = []
        for place in self._found.places[name]:
            low, high = max(start, place.start), min(stop, place.stop)
            if low < high:
                vector = self._found.vectors[state][place.vector]
                pieces.append(vector.pieces(place.first + low - place.start, high - low))
        return self._join(pieces, stop - start, name)

    def read_buffer(self, name: str) -> torch.Tensor:
        """All of it."""
        stored = self.buffers[name]
        return self._join([iter([(stored, 0, stored.numel)])], stored.numel, name).view(stored.shape)

    def num_steps(self, name: str) -> int:
        """How often a parameter was updated.

        Raises
        ------
        CheckpointError
            If that is not told.
        """
        place = self._found.places[name][0]
        vector = self._found.vectors[VALUES][place.vector]
        steps = self._found.steps[place.vector]
        number = bisect_right(vector.ends, place.first) if len(steps) > 1 else 0
        count = steps[min(number, len(steps) - 1)]
        if isinstance(count, PickledTensor):
            count = self._join([iter([(count, 0, count.numel)])], count.numel, name).item()
        if not isinstance(count, int | float) or count != int(count) or count < 0:
            raise CheckpointError(f"{self.path} does not tell how often {name[:200]} was updated")
        return int(count)

    def _join(self, pieces: Sequence[Iterator[tuple[PickledTensor, int, int]]], numel: int, name: str) -> torch.Tensor:
        parts = []
        for tensor, first, count in (piece for of_one in pieces for piece in of_one):
            part = torch.empty(count, dtype=tensor.dtype)
            tensor.read(self._files.fd(tensor.path), first, part)
            parts.append(part)
        joined = torch.cat(parts) if parts else torch.empty(0)
        if joined.numel() != numel:
            raise CheckpointError(f"{self.path}: elements of {name[:200]} are missing")
        return joined


def _step_folder(directory: Path) -> Path:
    """The folder itself, or the one that its file `latest` names."""
    latest = directory / "latest"
    if not latest.is_file():
        return directory
    name = latest.read_text(encoding="utf-8", errors="replace")[:300].strip()
    if Path(name).name != name or not (directory / name).is_dir():
        raise CheckpointError(f"{latest} names {name!r}, which is no folder beside it")
    return directory / name


def _find(folder: Path) -> tuple[_Found, dict[str, PickledTensor]]:
    optimizers, models = _rank_files(folder)
    states = [read_torch_file(path, {}, inert=True)["optimizer_state_dict"] for path in optimizers]
    stage, count = _plain(states[0]["zero_stage"]), states[0]["partition_count"]
    num_ranks = max(count) if isinstance(count, list) else count
    if num_ranks != len(states):
        raise CheckpointError(f"{folder} has the states of {len(states)} ranks, and needs those of {num_ranks}")
    modules = [read_torch_file(path, {}, inert=True) for path in models]
    if modules[0].get("mp_world_size", 1) != 1:
        raise CheckpointError(f"{folder} was made with tensor parallelism: join its parts with DeepSpeed first")
    found = _Found()
    if stage == 3:
        _find_pieces(found, states, modules[0]["param_shapes"])
    elif stage in (1, 2):
        _find_cut_groups(found, states, modules[0]["param_shapes"])
    else:
        raise CheckpointError(f"{folder} is of ZeRO stage {stage!r:.50}, expected 1, 2 or 3")
    _find_frozen(found, modules, is_cut=stage == 3)
    for alias, name in (modules[0].get("shared_params") or {}).items():
        _share(found.shapes, alias, name)
        _share(found.places, alias, name)
        _share(found.frozen, alias, name)
    module, names = modules[0]["module"], modules[0].get("buffer_names") or []
    buffers = {name: module[name] for name in names if name in module}
    if stage != 3:
        # Stage 1 does not say what is frozen; the model's states hold it whole.
        for name, tensor in module.items():
            if isinstance(tensor, PickledTensor) and name not in buffers and name not in found.shapes:
                found.shapes[name], found.frozen[name] = tensor.shape, [tensor]
    return found, buffers


def _share(known: dict[str, _T], alias: str, name: str) -> None:
    if name in known:
        known[alias] = known[name]


def _rank_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The optimizer's and the model's, by ranks; the model's may be one."""
    found: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        match = _RANK_FILE.fullmatch(path.name)
        if match:
            found[match[2]][int(match[1])] = path
    files = {kind: [of_kind[rank] for rank in sorted(of_kind)] for kind, of_kind in found.items()}
    models = files["model"] or [folder / _WHOLE_MODEL_FILE]
    if not files["optim"] or not models[0].is_file():
        raise CheckpointError(
            f"{folder} holds no checkpoint of DeepSpeed's ZeRO without tensor or pipeline parallelism"
            " (zero_pp_rank_0_mp_rank_00_optim_states.pt and model states)"
        )
    return files["optim"], models


def _find_cut_groups(found: _Found, states: Sequence[Any], shapes: Sequence[Mapping[str, Any]]) -> None:
    """Stages 1 and 2; see [Note: DeepSpeed's partitions]. A vector is a group's."""
    paddings = states[0].get("param_alignment_paddings")
    kept = [state["base_optimizer_state"] for state in states]
    for group, of_group in enumerate(shapes):
        parts = {VALUES: [state["single_partition_of_fp32_groups"][group] for state in states]}
        parts |= _moments([of_rank["state"][group] for of_rank in kept])
        for state, tensors in parts.items():
            found.vectors.setdefault(state, {})[group] = _Vector.of(tensors)
        found.steps[group] = [_step(kept[0], group)]
        first = 0
        for number, (name, shape) in enumerate(of_group.items()):
            numel = math.prod(shape)
            found.shapes[name] = tuple(shape)
            found.places[name] = [_Place(0, numel, group, first)]
            first += numel + (paddings[group][number] if paddings else 0)


def _find_pieces(found: _Found, states: Sequence[Any], shapes: Sequence[Mapping[str, Any]]) -> None:
    """Stage 3; see [Note: DeepSpeed's partitions]. A vector is a rank's."""
    for rank, state in enumerate(states):
        kept = state["optimizer_state_dict"]
        groups = range(len(state["fp32_flat_groups"]))
        parts = {VALUES: list(state["fp32_flat_groups"])}
        for group in groups:
            for name, tensors in _moments([kept["state"][group]]).items():
                parts.setdefault(name, []).extend(tensors)
        for name, tensors in parts.items():
            found.vectors.setdefault(name, {})[rank] = _Vector.of(tensors)
        found.steps[rank] = [_step(kept, group) for group in groups]
    first = 0
    for name, shape in ((name, shape) for of_group in shapes for name, shape in of_group.items()):
        numel = math.prod(shape)
        share = -(-numel // len(states))
        found.shapes[name] = tuple(shape)
        found.places[name] = [
            _Place(min(rank * share, numel), min((rank + 1) * share, numel), rank, first) for rank in range(len(states))
        ]
        first += share


def _find_frozen(found: _Found, modules: Sequence[Any], *, is_cut: bool) -> None:
    for name, shape in (modules[0].get("frozen_param_shapes") or {}).items():
        holders = modules if is_cut else modules[:1]
        found.shapes[name] = tuple(shape)
        found.frozen[name] = [holder["frozen_param_fragments"][name] for holder in holders]


def _moments(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[PickledTensor]]:
    """What is kept of each element."""
    names = [name for name, value in of_ranks[0].items() if isinstance(value, PickledTensor) and name != "step"]
    return {name: [of_rank[name] for of_rank in of_ranks] for name in names}


def _step(kept: Mapping[str, Any], group: int) -> Any:
    count = kept["state"][group].get("step")
    return kept["param_groups"][group].get("step") if count is None else count


def _plain(value: Any) -> Any:
    """The number of an enumeration's member."""
    return value.args[0] if isinstance(value, Inert) and value.args else value
