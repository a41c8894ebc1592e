"""Checkpoints of DeepSpeed's ZeRO, into a run's homes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from zerooffload.checkpoint.deepspeed_reader import VALUES, DeepSpeedReader
from zerooffload.checkpoint.model_weights import persistent_buffers
from zerooffload.errors import CheckpointError
from zerooffload.runtime.importing import import_states
from zerooffload.runtime.loading import listed
from zerooffload.runtime.logical_states import PARAM, held_params
from zerooffload.runtime.run import Run
from zerooffload.sharding.layout import ParamSpec


def load_deepspeed(run: Run, model: nn.Module, directory: Path, *, moments: bool) -> None:
    """See `zo.load_deepspeed`."""
    import_states(run, lambda: _DeepSpeedStates(directory, run, model), moments=moments, call="zo.load_deepspeed")


class _DeepSpeedStates:
    """Implements `ForeignStates`."""

    def __init__(self, directory: Path, run: Run, model: nn.Module) -> None:
        self.reader = DeepSpeedReader(directory)
        self._buffers = dict(persistent_buffers(model))
        known = {name for held in held_params(run.units) for name in held.param.names}
        unexpected = [name for name in self.reader.shapes if name not in known]
        wrong = [
            name
            for name, buffer in self._buffers.items()
            if name not in self.reader.buffers or self.reader.buffers[name].shape != buffer.shape
        ]
        for what, found in (("the model lacks", unexpected), ("the checkpoint has no such buffer:", wrong)):
            if found:
                raise CheckpointError(f"{self.reader.path} is of another model: {what} {listed(found)}")

    def shape(self, param: ParamSpec, state: str) -> tuple[int, ...] | None:
        """See `ForeignStates`."""
        name = self._name(param)
        if name is None or (state != PARAM and not self.reader.is_trained(name)):
            return None
        return self.reader.shapes[name] if state == PARAM or state in self.reader.states else None

    def read(self, param: ParamSpec, state: str, start: int, stop: int) -> torch.Tensor:
        """See `ForeignStates`."""
        name = self._name(param)
        if name is None:
            raise CheckpointError(f"{self.reader.path} lacks {param.name}")
        return self.reader.read(name, VALUES if state == PARAM else state, start, stop)

    def num_steps(self, param: ParamSpec) -> int:
        """See `ForeignStates`."""
        return self.reader.num_steps(self._name(param) or param.name)

    def close(self) -> None:
        """See `ForeignStates`."""
        self.reader.close()

    def fill_buffers(self) -> None:
        """See `ForeignStates`."""
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(self.reader.read_buffer(name))

    def _name(self, param: ParamSpec) -> str | None:
        return next((name for name in param.names if name in self.reader.shapes), None)
