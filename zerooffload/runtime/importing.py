"""States from checkpoints of others, which know parameters by their names, into a run's homes, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from zerooffload.errors import CheckpointError
from zerooffload.optim.low_bits import NEAREST
from zerooffload.optim.reference import write_moment
from zerooffload.runtime.loading import Views, joined, listed, pieces_to_fill, set_steps, set_values, write_all
from zerooffload.runtime.logical_states import PARAM, Piece, StateChunk, held_params, owned_chunks, runs_in_whole
from zerooffload.runtime.run import Run
from zerooffload.sharding.collectives import agree
from zerooffload.sharding.layout import ParamSpec


class ForeignStates(Protocol):
    """A checkpoint of another framework; a state is `PARAM`, or a moment by torch's name."""

    def shape(self, param: ParamSpec, state: str) -> tuple[int, ...] | None:
        """As it was saved; None if it was not."""

    def read(self, param: ParamSpec, state: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)`, counted row by row in all of it: 1D, in host memory, of any floating dtype.

        Raises
        ------
        CheckpointError
            If they are not there.
        """

    def num_steps(self, param: ParamSpec) -> int:
        """How often it was updated."""

    def fill_buffers(self) -> None:
        """Copy the saved buffers into the model's."""

    def close(self) -> None:
        """Close the files."""


def import_states(run: Run, open_states: Callable[[], ForeignStates], *, moments: bool, call: str) -> None:
    """Replace what the run's homes and the model's buffers hold. Collective.

    Parameters
    ----------
    open_states : callable
        Opens the checkpoint, which is closed in the end.
    moments : bool
        Take over what the optimizer keeps, too; else it begins afresh.
    call : str
        Of the user, for messages.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, or of another model. If it says so while states are written, the run cannot go on.
    ConfigError
        If the model is in use.
    """
    run.empty_for(call)
    with ExitStack() as stack:

        def opened() -> ForeignStates:
            states = open_states()
            stack.callback(states.close)
            return states

        source = agree(run.collectives, opened, "opening a checkpoint")
        _refill(run, source, moments=moments)
        source.fill_buffers()


def _refill(run: Run, source: ForeignStates, *, moments: bool) -> None:
    rule = run.rule
    names = [moment.name for moment in rule.moments] if moments else []
    params = [held.param for held in held_params(run.units)]
    trained = [held.param for held in held_params(run.units) if held.trainable]
    updated = agree(run.collectives, lambda: _check(source, params, trained, names), "checking a checkpoint")
    num_steps = {param.name: source.num_steps(param) for param in trained if param.name in updated}
    chunks = owned_chunks(run.units)

    def fill_chunk(chunk: StateChunk, views: Views) -> None:
        for piece, target in pieces_to_fill(chunk, views):
            set_values(target, _read(source, piece, PARAM))
            if chunk.part.training is not None and piece.param.name in updated:
                for moment in rule.moments:
                    write_moment(target, moment, _read(source, piece, moment.name).float(), NEAREST)

    with run.logical_states(chunks, alone=True) as homes:

        def fill() -> None:
            write_all(homes, chunks, fill_chunk)
            set_steps(run.units, lambda param: num_steps.get(param.name, 0))

        run.refill(fill, max(num_steps.values(), default=0))


def _read(source: ForeignStates, piece: Piece, state: str) -> torch.Tensor:
    runs = ((first, first + place.stop - place.start) for first, place in runs_in_whole(piece))
    return joined([source.read(piece.param, state, first, stop) for first, stop in runs])


def _check(
    source: ForeignStates, params: Sequence[ParamSpec], trained: Sequence[ParamSpec], moments: Sequence[str]
) -> set[str]:
    """The parameters, by name, that have moments; those without were never updated."""
    missing = [param.name for param in params if source.shape(param, PARAM) is None]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}")
    updated = set()
    for param in trained if moments else ():
        found = [name for name in moments if source.shape(param, name) is not None]
        if found and len(found) < len(moments):
            raise CheckpointError(f"the checkpoint has {' and '.join(found)} of {param.name}, but not {moments}")
        if found:
            updated.add(param.name)
    if moments and not updated:
        raise CheckpointError(
            f"the checkpoint holds no {' and '.join(moments)}: give the optimizer that it was saved with, or none, to"
            " load the parameters alone"
        )
    for param in params:
        for state in (PARAM, *(moments if param.name in updated else ())):
            if source.shape(param, state) != param.whole_shape:
                raise CheckpointError(
                    f"{param.name} has the shape {list(param.whole_shape)}, its {state} in the checkpoint"
                    f" {list(source.shape(param, state) or ())}"
                )
    return updated
