"""States seen and changed from outside the training loop: whole parameters, gradients, optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerooffload.config import TierName
from zerooffload.errors import ConfigError
from zerooffload.memory import Lease
from zerooffload.optim.low_bits import NEAREST
from zerooffload.optim.record import MASTER, REMAINDER
from zerooffload.optim.reference import read_moment, write_moment
from zerooffload.optim.rules import Rule
from zerooffload.runtime.gradient_access import GradientAccess
from zerooffload.runtime.gradients import GradientPath
from zerooffload.runtime.home_reads import HomeReads
from zerooffload.runtime.residency import Residency
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.runtime.slot_access import SlotAccess, bits, join_pieces, own_piece
from zerooffload.runtime.snapshots import Snapshots
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.collectives import Collectives
from zerooffload.sharding.layout import Slot
from zerooffload.sharding.local_tensors import distributed_like, local_like
from zerooffload.sharding.registry import Residence, residence_of
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat
from zerooffload.tiers import Block


@dataclass(frozen=True)
class _State:
    """A parameter's optimizer state that is to be taken over: tensors cut as the parameter is, by name."""

    num_steps: int
    local: Mapping[str, torch.Tensor]


class ParamAccess:
    """Units made full for a while, and copies of single parameters' states.

    Parameters
    ----------
    ended_half_way : callable
        Told of the error if a change fails when a part of it is at home: what is there is neither old nor new.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        gradients: GradientPath,
        collectives: Collectives,
        resources: Resources,
        parts: Parts,
        rule: Rule,
        updates: UpdateQueue,
        snapshots: Snapshots,
        home_reads: HomeReads,
        ended_half_way: Callable[[BaseException], None],
    ) -> None:
        self._snapshots = snapshots
        self._home_reads = home_reads
        self._ended_half_way = ended_half_way
        self._num_open = 0
        self._updates = updates
        self._rule = rule
        self._residency = residency
        self._gradients = gradients
        self._collectives = collectives
        self._resources = resources
        self._host = resources.budgets[TierName.HOST]
        self._slots = SlotAccess(resources.ring, parts, residency.settle, updates, home_reads.before_change)
        self._whole_gradients = GradientAccess(self._slots, collectives, gradients, self.lease_copies)

    @property
    def is_open(self) -> bool:
        """Whether parameters are shown to the user now."""
        return self._num_open > 0

    @contextmanager
    def full(self, units: Iterable[Unit], *, writeback: bool, grads: bool) -> Iterator[None]:
        """The parameters of `units` show their values inside; see `zo.full_params`.

        Edits reach the homes when the block ends well, and are undone when it raises or `writeback` is off, or when the
        first of them cannot be taken home.
        """
        units = list(dict.fromkeys(units))
        if grads:
            # An update whose gradient could not be written tells so.
            self._updates.finish()
            self._gradients.drain()
        with ExitStack() as stack:
            stack.callback(self._residency.release, units)
            self._residency.require(units)
            # An edit must not be taken for what was gathered.
            self._residency.wait_for_copies(units)
            # Others are edited in their ranges, and taken home from there.
            self._snapshots.before_edit(part for unit in units for part in unit.parts if part.range is None)
            copies = [stack.enter_context(self._copy(part)) for unit in units for part in unit.parts]
            if grads:
                stack.enter_context(self._whole_gradients.shown(units, writeback=writeback))
            self._num_open += 1
            stack.callback(self._one_less_open)
            try:
                yield
                if writeback:
                    self._check_outlive(copies)
                    with self._all_or_told():
                        for part, before in copies:
                            self._write_back(part, before)
            except BaseException:
                _undo(copies)
                raise
            if not writeback:
                _undo(copies)

    def _one_less_open(self) -> None:
        self._num_open -= 1

    def wait_for_updates(self, units: Iterable[Unit]) -> None:
        """Parameters that are full at home show the values after the last step from now on.

        Raises
        ------
        TierIOError
            If a unit could not be updated.
        """
        self._residency.refresh(units)

    def read_parameter(self, residence: Residence) -> torch.Tensor:
        """A copy of a parameter's values in host memory."""
        part, index = residence.part, residence.slot_index
        return self._join_pieces(part, index, self._slots.read(part, part.home, index))["param"]

    def read_gradient_piece(self, part: UnitFlat, training: TrainingStates, index: int) -> torch.Tensor:
        """A copy of this rank's piece of a parameter's gradient in host memory, 1D, as its home holds it."""
        return self._slots.read(part, training.gradient, index, part.shard)["grad"]

    def read_optimizer_state(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of `step`, the moments in fp32 and what a master has beyond its parameter.

        They are leased from the host's budget while they live.
        """
        residence, training = _trained(param)
        part, index, rule = residence.part, residence.slot_index, self._rule
        kept = [item for item in training.optimizer.layout.parts if item in (REMAINDER, MASTER)]
        nbytes = sum(item.dtype.itemsize for item in kept) + 4 * len(rule.moments)
        lease = self.lease_copies(nbytes * _slot(residence).param.numel)
        record = self._slots.read(part, training.optimizer, index)
        state = {item.name: record[item.name] for item in kept}
        state |= {moment.name: read_moment(record, moment) for moment in rule.moments}
        state = self._join_pieces(part, index, state)
        keep_lease(lease, state.values())
        state = {name: distributed_like(param, value) for name, value in state.items()}
        return {"step": torch.tensor(float(training.steps[index])), **state}

    def forget_optimizer_state(self, param: nn.Parameter) -> None:
        """Zero a parameter's moments and steps; what its master has beyond it belongs to its value and stays."""
        with self._all_or_told():
            self._forget(*_trained(param))

    def write_optimizer_states(self, states: Iterable[tuple[nn.Parameter, Mapping[str, Any] | None]]) -> None:
        """Replace records, None by that of a parameter that never stepped.

        Parts that a state lacks (torch's has no remainder) stay as they are.

        Raises
        ------
        ConfigError
            If a state is not one of its parameter. None has been replaced then.
        """
        checked = [(_trained(param), None if state is None else self._checked(param, state)) for param, state in states]
        with self._all_or_told():
            for (residence, training), state in checked:
                if state is None:
                    self._forget(residence, training)
                else:
                    self._write_state(residence, training, state)

    def _forget(self, residence: Residence, training: TrainingStates) -> None:
        part, index = residence.part, residence.slot_index
        if training.steps[index]:
            record = self._slots.read(part, training.optimizer, index)
            zeros = {name: piece.zero_() for name, piece in record.items() if name not in (REMAINDER.name, MASTER.name)}
            self._slots.write(part, training.optimizer, index, zeros)
            training.steps[index] = 0

    def _checked(self, param: nn.Parameter, state: Mapping[str, Any]) -> _State:
        """What this rank has of a parameter's state."""
        own = _slot(_trained(param)[0]).param.name
        moments = {moment.name for moment in self._rule.moments}
        if missing := moments - state.keys():
            raise ConfigError(f"{own}: the state lacks {', '.join(sorted(missing))}")
        local = {}
        for name in ({REMAINDER.name, MASTER.name} | moments) & state.keys():
            value, title = state[name], f"{own}: {name}"
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"{title} is {type(value).__name__}, expected a tensor")
            if value.shape != param.shape:
                raise ConfigError(f"{title} has shape {tuple(value.shape)}, expected {tuple(param.shape)}")
            local[name] = local_like(param, value, title)
        try:
            return _State(int(state["step"]), local)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{own}: step is {state['step']!r}, expected a number") from error

    def _write_state(self, residence: Residence, training: TrainingStates, state: _State) -> None:
        part, index = residence.part, residence.slot_index
        record = self._slots.read(part, training.optimizer, index)
        pieces = {name: own_piece(part, index, value) for name, value in state.local.items()}
        for moment in self._rule.moments:
            write_moment(record, moment, pieces.pop(moment.name).to("cpu", torch.float32), NEAREST)
        for name in pieces.keys() & record.keys():
            record[name].copy_(pieces[name])
        self._slots.write(part, training.optimizer, index, record)
        training.steps[index] = state.num_steps

    def _join_pieces(self, part: UnitFlat, index: int, piece: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return join_pieces(self._collectives, part, index, piece)

    def lease_copies(self, nbytes: int) -> Lease:
        """Host memory for copies that the user gets.

        Raises
        ------
        BudgetError
            If they do not fit beside what the run holds.
        """
        return self._host.lease(nbytes, "copies for the user")

    @contextmanager
    def _all_or_told(self) -> Iterator[None]:
        """What the block changes is all at home, or none of it, or the run knows."""
        before = self._slots.num_changed
        try:
            yield
        except BaseException as error:
            if self._slots.num_changed > before:
                self._ended_half_way(error)
            raise

    @contextmanager
    def _copy(self, part: UnitFlat) -> Iterator[tuple[UnitFlat, list[torch.Tensor]]]:
        with self.lease_copies(part.flat.layout.nbytes):
            yield part, [tensor.detach().clone() for tensor in part.flat.tensors]

    def _check_outlive(self, copies: list[tuple[UnitFlat, list[torch.Tensor]]]) -> None:
        """See that edits are of what a committed step covers: what is frozen has one slot, or none."""
        if self._resources.commits is None:
            return
        for part, before in copies:
            for slot, tensor, old in zip(part.flat.layout.slots, part.flat.tensors, before, strict=True):
                if part.training is None and bool((bits(tensor) != bits(old)).any()):
                    raise ConfigError(
                        f"{slot.param.name} was frozen when zo.offload was called, and steps are committed here: a"
                        " change of it would not survive a crash. Change it before zo.offload, or offload it with"
                        " requires_grad=True and leave it out of the optimizer, or set atomic_steps=False"
                    )

    def _write_back(self, part: UnitFlat, before: list[torch.Tensor]) -> None:
        """Take edited parameters home. Where a value changed, what its master had beyond it belonged to the old one."""
        for index, (tensor, old) in enumerate(zip(part.flat.tensors, before, strict=True)):
            changed = bits(tensor) != bits(old)
            if not bool(changed.any()):
                continue
            if part.home_is_shared:
                # Every rank has edited the same, and writes what it updates, or, of what is frozen, all of it. When all
                # are here, all have what the home held, a save of theirs included.
                self._snapshots.before_edit([part])
                self._home_reads.let_shared_change([part])
            if part.range is not None:
                self._slots.write(part, part.home, index, {"param": own_piece(part, index, tensor.detach())})
                part.own_changed()
            else:
                self._slots.copy_again(part.home)
            if part.training is not None:
                self._write_back_master(part, part.training.optimizer, index, tensor.detach(), changed)

    def _write_back_master(
        self, part: UnitFlat, optimizer: Block, index: int, param: torch.Tensor, changed: torch.Tensor
    ) -> None:
        parts = optimizer.layout.parts
        if REMAINDER not in parts and MASTER not in parts:
            return
        record = self._slots.read(part, optimizer, index)
        here = own_piece(part, index, changed).cpu()
        if REMAINDER in parts:
            record[REMAINDER.name].masked_fill_(here, 0)
        else:
            values = own_piece(part, index, param).to("cpu", torch.float32)
            record[MASTER.name].copy_(torch.where(here, values, record[MASTER.name]))
        self._slots.write(part, optimizer, index, record)


def units_of(module: nn.Module) -> tuple[object, list[Unit]]:
    """The run and the units that own the parameters of `module`.

    Raises
    ------
    ConfigError
        If a parameter of it is not offloaded.
    """
    run: object = None
    units: dict[Unit, None] = {}
    for name, param in module.named_parameters():
        residence = residence_of(param)
        if residence is None:
            raise ConfigError(f"parameter {name} of {type(module).__name__} is not offloaded: call zo.offload first")
        run = residence.run
        units[residence.unit] = None
    if run is None:
        raise ConfigError(f"{type(module).__name__} has no parameters")
    return run, list(units)


def keep_lease(lease: Lease, tensors: Iterable[torch.Tensor]) -> None:
    """Hold a lease until the last of `tensors` is collected."""
    remaining = 0

    def one_gone() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            lease.release()

    for tensor in tensors:
        remaining += 1
        weakref.finalize(tensor, one_gone)


def _undo(copies: list[tuple[UnitFlat, list[torch.Tensor]]]) -> None:
    with torch.no_grad():
        for part, before in copies:
            for tensor, old in zip(part.flat.tensors, before, strict=True):
                tensor.data.copy_(old)


def _slot(residence: Residence) -> Slot:
    return residence.part.flat.layout.slots[residence.slot_index]


def _trained(param: nn.Parameter) -> tuple[Residence, TrainingStates]:
    residence = residence_of(param)
    if residence is None or residence.part.training is None:
        raise ConfigError(f"a parameter of shape {tuple(param.shape)} has no optimizer state here: it is not trained")
    return residence, residence.part.training
