"""Checkpoints of torch.distributed.checkpoint from a run's homes, and into them.

[Note: names in such checkpoints]
Those that `get_state_dict` of torch.distributed.checkpoint.state_dict gives: `model.<parameter>`,
`optimizer.state.<parameter>.exp_avg`, and param groups by number. Those of flattened optimizer states, which torchtitan
uses, differ in param groups alone, so these are there twice. Readers may call model and optimizer what they like.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerooffload.checkpoint.boxes import Box
from zerooffload.checkpoint.dcp_reader import DcpReader, prefix_of
from zerooffload.checkpoint.dcp_writer import DcpWriter, Key, Written, write_metadata
from zerooffload.checkpoint.model_weights import persistent_buffers
from zerooffload.checkpoint.staged_folder import StagedFolder
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.optim.reference import read_moment
from zerooffload.optim.rules import Moment
from zerooffload.runtime.importing import import_states
from zerooffload.runtime.loading import listed, short_pieces
from zerooffload.runtime.logical_states import EXACT_STATES, PARAM, box_of, exact_values, held_params, state_chunks
from zerooffload.runtime.run import Run
from zerooffload.sharding.collectives import agree, gather_from_all, writing_role
from zerooffload.sharding.layout import ParamSpec
from zerooffload.sharding.registry import residence_of

_BOX_NUMEL = 1 << 19
"""Elements of a tensor that are written at once."""
_MODEL, _OPTIMIZER = "model", "optimizer"
_STEP = "step"

Optimizers = Sequence[torch.optim.Optimizer]


def save_dcp(run: Run, model: nn.Module, optimizers: Optimizers, directory: Path) -> None:
    """See `zo.save_dcp`."""
    ranks = run.collectives
    is_first, writes = writing_role(ranks)

    def write() -> Written:
        with DcpWriter(folder.path, ranks.global_rank) as writer:
            if writes:
                _write_states(run, optimizers, writer)
            if is_first:
                _write_whole(run, model, optimizers, writer)
            writer.finish()
            return writer.written

    def finish() -> None:
        write_metadata(folder.path, everyones, _aliases(run))
        _check_complete(folder.path)
        folder.commit()

    run.check_idle("zo.save_dcp")
    folder = agree(ranks, lambda: StagedFolder(directory), "planning the checkpoint")
    try:
        agree(ranks, lambda: folder.create() if is_first else None, "making the folder")
        everyones = gather_from_all(ranks, agree(ranks, write, "writing the checkpoint"))
        agree(ranks, lambda: finish() if is_first else None, "finishing the checkpoint")
    finally:
        folder.discard()


def load_dcp(run: Run, model: nn.Module, optimizers: Optimizers, directory: Path) -> None:
    """See `zo.load_dcp`."""
    import_states(run, lambda: _DcpStates(directory, run, model), moments=bool(optimizers), call="zo.load_dcp")


class _DcpStates:
    """Implements `ForeignStates`."""

    def __init__(self, directory: Path, run: Run, model: nn.Module) -> None:
        self.reader = DcpReader(directory)
        tensors, held = self.reader.tensors, held_params(run.units)
        self._buffers = dict(persistent_buffers(model))
        names = {name for item in held for name in item.param.names}
        prefix = prefix_of(tensors, names, directory)
        if prefix is None:
            raise CheckpointError(f"{directory} holds no parameter of this model")
        self._prefix = {PARAM: prefix}
        for state in (*(moment.name for moment in run.rule.moments), _STEP):
            wanted = (f"{name}.{state}" for name in names)
            self._prefix[state] = prefix_of(tensors, wanted, directory, of_states=True) or ""
        known = {prefix + name for name in names | self._buffers.keys()}
        unexpected = [
            name for name in tensors if name.startswith(prefix) and name not in known and ".state." not in f".{name}"
        ]
        lacking = [name for name in self._buffers if prefix + name not in tensors]
        for what, found in (("the model lacks", unexpected), ("the checkpoint lacks", lacking)):
            if found:
                raise CheckpointError(f"{directory} is of another model: {what} {listed(found)}")

    def shape(self, param: ParamSpec, state: str) -> tuple[int, ...] | None:
        """See `ForeignStates`."""
        name = self._name(param, state)
        return None if name is None else self.reader.tensors[name].shape

    def read(self, param: ParamSpec, state: str, start: int, stop: int) -> torch.Tensor:
        """See `ForeignStates`."""
        name = self._name(param, state)
        if name is None:
            raise CheckpointError(f"{self.reader.path} lacks {state} of {param.name}")
        return self.reader.read(name, start, stop)

    def num_steps(self, param: ParamSpec) -> int:
        """See `ForeignStates`. torch's SGD counts none: what it keeps says that there was one."""
        name = self._name(param, _STEP)
        if name is None:
            return 1
        steps = float(self.reader.read(name, 0, 1))
        if not 0 <= steps < 1 << 31 or steps != int(steps):
            raise CheckpointError(f"{self.reader.path}: {param.name} was updated {steps} times")
        return int(steps)

    def close(self) -> None:
        """See `ForeignStates`."""
        self.reader.close()

    def fill_buffers(self) -> None:
        """See `ForeignStates`."""
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                saved = self.reader.tensors[self._prefix[PARAM] + name]
                if saved.shape != buffer.shape:
                    raise CheckpointError(
                        f"{self.reader.path}: {name} has the shape {list(saved.shape)}, not {list(buffer.shape)}"
                    )
                buffer.copy_(self.reader.read(saved.name, 0, buffer.numel()).view(saved.shape))

    def _name(self, param: ParamSpec, state: str) -> str | None:
        suffix = "" if state == PARAM else f".{state}"
        names = (self._prefix[state] + name + suffix for name in param.names)
        return next((name for name in names if name in self.reader.tensors), None)


def _write_states(run: Run, optimizers: Optimizers, writer: DcpWriter) -> None:
    """What this rank stands for: see [Note: what a rank holds of a logical tensor]."""
    optimized = {param.name for param in _params_of(optimizers)}
    chunks = [chunk for chunk in state_chunks(run.units) if chunk.part.flat.layout.counts]
    states = None if optimizers else EXACT_STATES
    with torch.no_grad(), run.logical_states(chunks, states, alone=True) as homes:
        for reading in homes.read(chunks):
            chunk, views = reading.chunk, reading.views()
            for piece in short_pieces(chunk, _BOX_NUMEL):
                param, items = piece.param, chunk.cut(views, piece.place)
                box = box_of(param)
                writer.write((_MODEL, param.name), box, piece.start, exact_values(items))
                for moment in run.rule.moments if param.name in optimized and chunk.part.training is not None else ():
                    key = _state_key(param, moment)
                    writer.write(key, box, piece.start, read_moment(items, moment).contiguous())


def _write_whole(run: Run, model: nn.Module, optimizers: Optimizers, writer: DcpWriter) -> None:
    """What every rank has: buffers, step counts and settings."""
    for name, buffer in persistent_buffers(model):
        writer.write((_MODEL, name), Box.of_all(buffer.shape), 0, buffer.detach().reshape(-1).cpu())
    for held in held_params(run.units):
        box = Box.of_all(held.param.whole_shape)
        if box.numel == 0:
            writer.write((_MODEL, held.param.name), box, 0, torch.empty(0, dtype=held.dtype))
    num_steps = {held.param.name: held.num_steps for held in held_params(run.units)}
    groups = (group for optimizer in optimizers for group in _groups(optimizer))
    for number, (settings, params) in enumerate(groups):
        for name, value in settings.items():
            writer.write_value((_OPTIMIZER, "param_groups", number, name), value)
        writer.write_value((_OPTIMIZER, "param_groups", number, "params"), [param.name for param in params])
        for param in params:
            steps = torch.tensor([float(num_steps[param.name])])
            writer.write((_OPTIMIZER, "state", param.name, _STEP), Box.of_all(()), 0, steps)
            for name, value in settings.items():
                writer.write_value((_OPTIMIZER, f"param_groups.{param.name}.{name}"), value)


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], list[ParamSpec]]]:
    """Settings, those that torch's optimizer of that name has besides included, and parameters."""
    twin: Callable[..., torch.optim.Optimizer] | None = getattr(torch.optim, type(optimizer).__name__, None)
    defaults = {} if twin is None else twin([torch.zeros(1)]).defaults
    for group in optimizer.param_groups:
        settings = {
            **defaults,
            **{name: value for name, value in group.items() if name not in ("params", "param_names")},
        }
        settings = {
            name: float(value) if isinstance(value, torch.Tensor) else value for name, value in settings.items()
        }
        yield settings, [_spec_of(param) for param in group["params"] if param.requires_grad]


def _params_of(optimizers: Optimizers) -> list[ParamSpec]:
    return [param for optimizer in optimizers for _, params in _groups(optimizer) for param in params]


def _spec_of(param: torch.Tensor) -> ParamSpec:
    residence = residence_of(param)
    if residence is None:
        raise ConfigError(f"a parameter of shape {tuple(param.shape)} of the optimizer is not offloaded")
    return residence.part.flat.layout.slots[residence.slot_index].param


def _state_key(param: ParamSpec, moment: Moment) -> Key:
    return (_OPTIMIZER, "state", param.name, moment.name)


def _aliases(run: Run) -> Mapping[Key, Key]:
    """Tied parameters have all their names."""
    specs = [held.param for held in held_params(run.units)]
    return {(_MODEL, alias): (_MODEL, param.name) for param in specs for alias in param.aliases}


def _check_complete(folder: Path) -> None:
    """See that the checkpoint can be read, and lacks nothing."""
    with DcpReader(folder) as reader:
        for saved in reader.tensors.values():
            numel = sum(box.numel for box, _ in saved.boxes)
            if numel != torch.Size(saved.shape).numel():
                raise CheckpointError(f"{os.fspath(folder)}: {numel} elements of {saved.name} were written")
