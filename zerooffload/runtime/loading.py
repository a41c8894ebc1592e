"""Loading a checkpoint into a run, whatever ranks, tiers and formats it was saved from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from zerooffload.checkpoint.folders import find_checkpoint
from zerooffload.checkpoint.manifest import Manifest, StateEntry
from zerooffload.checkpoint.reshard import Run, SavedParam, missing_and_unexpected
from zerooffload.checkpoint.shard_files import dtype_of
from zerooffload.checkpoint.shard_reader import ShardReader
from zerooffload.config import TierName
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.optim.low_bits import NEAREST
from zerooffload.optim.record import MASTER, REMAINDER, OptimizerStates, exponents_name
from zerooffload.optim.reference import read_moment, split_master, write_moment
from zerooffload.optim.rules import RULES, Moment
from zerooffload.runtime.logical_states import (
    EXACT_STATES,
    HOLDER,
    PARAM,
    HeldParam,
    LogicalStates,
    Piece,
    StateChunk,
    box_of,
    exact_values,
    held_params,
    owned_chunks,
)
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.sharding.collectives import Collectives, agree, gather_from_all
from zerooffload.sharding.layout import ParamSpec
from zerooffload.sharding.unit import Unit
from zerooffload.tiers import dtype_name

Views = Mapping[str, torch.Tensor]

_PIECE_NUMEL = 1 << 16
"""Elements that are converted at once; whole blocks of any state."""
_MOST_NAMES = 20
"""That a message lists."""


class Loading:
    """One load: all is checked when it is made, before anything is changed. A context manager.

    Parameters
    ----------
    rank : int
        Of this rank among all that train the model.
    names : Sequence[Sequence[str]]
        All names of each parameter of the model, those of its other parts included.

    Raises
    ------
    CheckpointError
        If the folder is no whole checkpoint, or one of another model.
    ConfigError
        If the run's optimizer keeps other moments.
    BudgetError
        If the host has no room for what is under way.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        units: Sequence[Unit],
        states: OptimizerStates,
        *,
        names: Sequence[Sequence[str]],
        resources: Resources,
        parts: Parts,
    ) -> None:
        self._rank = rank
        self._units = units
        self._moments = RULES[states.algorithm].moments
        self._open = ExitStack()
        try:
            self._reader = self._open.enter_context(ShardReader(find_checkpoint(directory)))
            self._saved = self._reader.checkpoint.params
            self._check_algorithm(states.algorithm)
            self._check_model(names)
            self._reader.num_kept = max(map(self._num_parts, held_params(units)), default=1)
            host = resources.budgets[TierName.HOST]
            self._open.callback(host.lease(self._reader.kept_nbytes, HOLDER).release)
            self._chunks = owned_chunks(units)
            self._states = self._open.enter_context(LogicalStates(self._chunks, host, parts))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; again is harmless."""
        self._open.close()

    @property
    def manifest(self) -> Manifest:
        """Of the rank that had this one's number, else of rank 0: what this rank takes over beside the states."""
        manifests = self._reader.checkpoint.manifests
        return manifests[self._rank if self._rank < len(manifests) else 0]

    @property
    def run_state(self) -> dict[str, Any]:
        """What `Tracking` puts back; random states only of the rank that had this one's number."""
        state = asdict(self.manifest.run)
        if self.manifest.rank != self._rank:
            del state["random"]
        return state

    def fill(self) -> None:
        """Let the states be those that were saved.

        Raises
        ------
        CheckpointError
            If bytes are not what was written.
        TierIOError
            If a state cannot be written.
        """
        write_all(self._states, self._chunks, self._fill)
        set_steps(self._units, lambda param: self._saved_of(param.names).entry.num_steps)

    def put_back(self, take_over: Callable[[dict[str, Any]], None]) -> None:
        """Let `take_over` have what belongs to the run beside the states.

        Raises
        ------
        CheckpointError
            If it does not fit.
        """
        try:
            take_over(self.run_state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"what the checkpoint holds beside the states cannot be put back: {error}") from error

    def _fill(self, chunk: StateChunk, views: Views) -> None:
        for piece, target in pieces_to_fill(chunk, views):
            saved = self._saved_of(piece.param.names)
            self._fill_values(saved, piece, target)
            for moment in self._moments if chunk.part.training is not None else ():
                self._fill_moment(saved, piece, target, moment)

    def _fill_values(self, saved: SavedParam, piece: Piece, target: Views) -> None:
        """The parameter, and what its master has beyond it."""
        source = self._read(saved, EXACT_STATES, piece)
        if source[PARAM].dtype is target[PARAM].dtype:
            for name, items in source.items():
                target[name].copy_(items)
            return
        set_values(target, exact_values(source))

    def _fill_moment(self, saved: SavedParam, piece: Piece, target: Views, moment: Moment) -> None:
        names = (moment.name, exponents_name(moment.name))
        states = {state.name: state for state in saved.group.states if state.name in names}
        is_stored_alike = {name: state.dtype for name, state in states.items()} == {
            name: dtype_name(target[name].dtype) for name in names if name in target
        }
        box = box_of(piece.param)
        if is_stored_alike and saved.part_of(box) is not None:
            for name, items in self._read(saved, names, piece).items():
                target[name].copy_(items)
            return
        runs = saved.runs(box, piece.start, piece.stop)
        values = [self._moment_of(run, states.values(), moment) for run in runs]
        write_moment(target, moment, joined(values), NEAREST)

    def _moment_of(self, run: Run, states: Collection[StateEntry], moment: Moment) -> torch.Tensor:
        """Its values, of elements that may begin within a block."""
        start = run.first - run.first % max(state.block_numel for state in states)
        items = {state.name: self._reader.read(run.part, state, start, run.stop) for state in states}
        return read_moment(items, moment)[run.first - start :]

    def _read(self, saved: SavedParam, names: Collection[str], piece: Piece) -> dict[str, torch.Tensor]:
        """Those of the states that the parameter has. Of blocks only if the parameter is cut as it was saved."""
        runs = list(saved.runs(box_of(piece.param), piece.start, piece.stop))
        return {
            state.name: joined([self._reader.read(run.part, state, run.first, run.stop) for run in runs])
            for state in saved.group.states
            if state.name in names
        }

    def _saved_of(self, names: Sequence[str]) -> SavedParam:
        return next(self._saved[name] for name in names if name in self._saved)

    def _num_parts(self, item: HeldParam) -> int:
        """How many parts of a parameter are read in turn: one, if it is cut as it was when it was saved."""
        saved = self._saved_of(item.param.names)
        return len(saved.parts) if saved.part_of(box_of(item.param)) is None else 1

    def _check_algorithm(self, algorithm: str) -> None:
        saved = self.manifest.algorithm
        if RULES[saved].moments != self._moments:
            raise ConfigError(
                f"{self._reader.path} was saved with {saved}, which keeps other moments than {algorithm}: call"
                f' zo.offload with OffloadConfig(algorithm="{saved}")'
            )

    def _check_model(self, names: Sequence[Sequence[str]]) -> None:
        held, path = held_params(self._units), self._reader.path
        missing, unexpected = missing_and_unexpected(self._reader.checkpoint, names)
        if missing or unexpected:
            told = {"it lacks": missing, "the model lacks": unexpected}
            lists = "; ".join(f"{what} {listed(names)}" for what, names in told.items() if names)
            raise CheckpointError(f"{path} is of another model: {lists}")
        differences = [found for item in held if (found := self._difference(item))]
        if differences:
            raise CheckpointError(f"{path} is of another model: {listed(differences)}")

    def _difference(self, item: HeldParam) -> str:
        """What forbids to load a parameter, in words; "" if nothing does."""
        saved, name = self._saved_of(item.param.names), item.param.name
        if saved.entry.shape != item.param.whole_shape:
            return f"{name} has the shape {list(item.param.whole_shape)}, saved was {list(saved.entry.shape)}"
        if saved.group.trainable != item.trainable:
            kinds = ("frozen", "trained") if saved.group.trainable else ("trained", "frozen")
            return f"{name} is {kinds[0]} now and was {kinds[1]} when it was saved"
        dtype = dtype_of(saved.group.states[0], str(self._reader.path))
        if dtype is not item.dtype and not (dtype.is_floating_point and item.dtype.is_floating_point):
            return f"{name} is {dtype_name(item.dtype)}, saved was {dtype_name(dtype)}"
        expected = [(PARAM, dtype, 1)]
        if item.trainable:
            states = OptimizerStates(self.manifest.algorithm, self.manifest.moments)
            expected += [(part.name, part.dtype, part.block_numel) for part in states.parts(dtype)]
        found = [(state.name, dtype_of(state, name), state.block_numel) for state in saved.group.states]
        return "" if found == expected else f"{name} has other states than {[state for state, _, _ in expected]}"


def open_loading(
    directory: Path,
    units: Sequence[Unit],
    states: OptimizerStates,
    collectives: Collectives,
    *,
    resources: Resources,
    parts: Parts,
) -> Loading:
    """See `Loading`; on every rank or on none. Collective."""
    rank = gather_from_all(collectives, collectives.global_rank).index(collectives.global_rank)
    mine = [held.param.names for held in held_params(units)]
    # Parts of a parameter have its names.
    names = list(dict.fromkeys(of_param for of_part in collectives.gather_of_parts(mine) for of_param in of_part))
    made: list[Loading] = []

    def make() -> None:
        made.append(Loading(directory, rank, units, states, names=names, resources=resources, parts=parts))

    try:
        agree(collectives, make, "loading a checkpoint")
    except BaseException:
        for loading in made:
            loading.close()
        raise
    return made[0]


def write_all(states: LogicalStates, chunks: Iterable[StateChunk], fill: Callable[[StateChunk, Views], None]) -> None:
    """Let `fill` set every chunk; return when all is home."""
    for chunk in chunks:
        states.write(chunk, partial(fill, chunk))
    states.finish()


def set_steps(units: Iterable[Unit], num_steps_of: Callable[[ParamSpec], int]) -> None:
    """Let the homes be known to hold new states, of parameters that were updated so often."""
    for part in (part for unit in units for part in unit.parts):
        part.flat.values_changed()
        part.own_changed()
        part.show_at_home()
        if part.training is not None:
            part.training.steps[:] = [num_steps_of(slot.param) for slot in part.flat.layout.slots]


def pieces_to_fill(chunk: StateChunk, views: Views) -> Iterator[tuple[Piece, dict[str, torch.Tensor]]]:
    """All elements of a chunk in short pieces, with the items of its states; they are zero, as padding stays."""
    for view in views.values():
        view.zero_()
    for piece in short_pieces(chunk, _PIECE_NUMEL):
        yield piece, chunk.cut(views, piece.place)


def short_pieces(chunk: StateChunk, numel: int) -> Iterator[Piece]:
    """The pieces of a chunk, cut into shorter ones of `numel` elements: whole blocks of any state."""
    for whole in chunk.pieces:
        for start in range(whole.start, whole.stop, numel):
            stop = min(start + numel, whole.stop)
            place = slice(whole.place.start + start - whole.start, whole.place.start + stop - whole.start)
            yield Piece(whole.param, start, stop, place)


def set_values(target: Views, values: torch.Tensor) -> None:
    """Set a parameter, and what its master has beyond it, to values of another dtype."""
    if REMAINDER.name in target:
        upper, remainder = split_master(values.float())
        target[PARAM].copy_(upper)
        target[REMAINDER.name].copy_(remainder)
    else:
        target[PARAM].copy_(values)
        if MASTER.name in target:
            target[MASTER.name].copy_(values)


def joined(items: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other, 1D; a single one itself."""
    return items[0] if len(items) == 1 else torch.cat(list(items))


def listed(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(name[:200] for name in names[:_MOST_NAMES]) + more
