"""What a model's forward and backward take, unit by unit, traced without weights.

[Note: whose an operation is]
In forward an operation belongs to the innermost hook point under way; outside of all, to the root. In backward it
belongs to the point in whose forward autograd made the node that runs: nodes are numbered, and the numbers at which
each call of a point began and ended are known. What runs between nodes (parts of a gradient that are added up) goes
with the node before, and so do nodes that are made in backward, where something is computed again. Operations that do
so, with gradients switched on, are no one's work.

[Note: whose a storage is]
What is alive between forward and backward belongs to the point that autograd keeps it for, whoever made it: computed
again, a point would do without. What is kept for several points, or by none (the loss, inputs that checkpoints keep),
belongs to the point that made it. So each storage counts once, and the points' bytes are the model's.

[Note: large results are new memory]
On a CPU the C library gives a large block back to the system when it is freed (see train/process.py), and the next one
comes in pages that the system finds and zeroes when they are first touched. That takes as long as several operations on
them: a fifth of a step is no rarity. A device's allocator keeps what it had.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks

from zerooffload.config import UnitSpec
from zerooffload.errors import ConfigError
from zerooffload.planner.byteless import StorageLife, StorageTracker, run_without_bytes, tensors_among
from zerooffload.planner.operations import work_of
from zerooffload.planner.profiles.model import ModelProfile, PassWork, UnitWork
from zerooffload.sharding.grouping import ROOT_NAME, find_units

LARGE_RESULT_NBYTES = 256 << 10
"""Of which on a result's memory is new."""
# Autograd's nodes that add to a parameter's gradient have no number of their own.
_NUMBER_OF_ACCUMULATION = 2**64 - 1


def trace_model(
    build_model: Callable[[], nn.Module],
    run_step: Callable[[nn.Module], torch.Tensor],
    *,
    units: UnitSpec = "auto",
    name: str,
    batch_size: int,
    sequence_length: int = 1,
    device: torch.device | str = "cpu",
) -> ModelProfile:
    """Run forward and backward of a step without memory for it, and add up what each unit takes.

    Parameters
    ----------
    build_model : callable
        Makes the model, in the dtype that it computes in, with weights of any value. Nothing is allocated for them.
        Blocks that checkpoint themselves have the bytes that are saved then; build them without to see both ways.
    run_step : callable
        Runs forward on one (micro-)batch and returns the loss, 0-dim.
    units : UnitSpec
        As in `OffloadConfig`.
    name : str
        Of the model, for people.
    batch_size, sequence_length : int
        Of the batch that `run_step` runs on.
    device : torch.device or str
        Where the step will run; it decides which kernels are used.

    Raises
    ------
    ConfigError
        If the model's way depends on values that are not there, `units` match no module, or there is no such device.
    RuntimeError
        Whatever torch raises for operations that it cannot run on tensors without bytes.
    """
    _refuse_missing(device)
    trace = _Trace(units)
    try:
        with saved_tensors_hooks(trace.saves, lambda tensor: tensor):
            run_without_bytes(build_model, run_step, trace, device=device)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"{name} cannot be traced without weights: its way depends on computed values ({error}). Where experts are"
            " chosen, an implementation that handles all of them in one operation can be traced (transformers: the"
            ' configuration\'s experts_implementation="grouped_mm")'
        ) from error
    return ModelProfile(
        name=name,
        batch_size=batch_size,
        sequence_length=sequence_length,
        units=tuple(trace.units()),
        peak_nbytes=trace.tracker.peak_bytes,
        saved_nbytes=trace.saved_nbytes,
    )


def _refuse_missing(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"a trace asks for device {device}, which is not here: leave it out ({error})") from error


@dataclass(eq=False)
class _Point:
    """A hook point while it is traced."""

    name: str
    forward: PassWork = field(default_factory=PassWork)
    backward: PassWork = field(default_factory=PassWork)
    input_nbytes: int = 0


class _Moment(NamedTuple):
    """Whose an operation is."""

    point: _Point
    is_backward: bool


@dataclass(eq=False)
class _Keeping:
    """For whom autograd keeps a storage, and from which operation on."""

    since: int
    points: set[_Point] = field(default_factory=set)


class _Trace:
    """Watches a step and notes whose each operation and each storage is."""

    def __init__(self, units: UnitSpec) -> None:
        self.tracker = StorageTracker()
        self.saved_nbytes = 0
        self._has_turned = False
        self._unit_spec = units
        self._root = _Point(ROOT_NAME)
        self._points: list[_Point] = []
        self._called: dict[_Point, None] = {}
        # The innermost last.
        self._under_way = [self._root]
        self._nodes = _NodeOwners(self._root)
        # Of each operation.
        self._moments: list[_Moment] = []
        self._kept: dict[StorageLife, _Keeping] = {}
        self._entered: set[StorageLife] = set()
        self._survivors: list[StorageLife] = []

    def built(self, model: nn.Module) -> None:
        self.tracker.begin(model)
        for unit in find_units(model, self._unit_spec):
            if unit.name != ROOT_NAME:
                self._points.append(_Point(unit.name))
                self._watch(unit.module, self._points[-1])

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        num_known = len(self.tracker.lives)
        self.tracker.made(result)
        point = self._nodes.owner() if self._has_turned else self._under_way[-1]
        self._moments.append(_Moment(point, self._has_turned))
        made = [life.nbytes for life in self.tracker.lives[num_known:]]
        work = PassWork(new_bytes=sum(nbytes for nbytes in made if nbytes >= LARGE_RESULT_NBYTES))
        work += work_of(func, args, kwargs, result) or PassWork()
        if not self._has_turned:
            point.forward += work
        elif not (torch.is_grad_enabled() and _NodeOwners.is_node_running()):
            point.backward += work

    def saves(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps a tensor."""
        life = self.tracker.life_of(tensor)
        if life is not None and not self._has_turned:
            keeping = self._kept.setdefault(life, _Keeping(since=self.tracker.now + 1))
            keeping.points.add(self._under_way[-1])
        return tensor

    def turned(self) -> None:
        self._has_turned = True
        self._under_way.clear()
        self._nodes.belong_to(None)
        self.saved_nbytes = self.tracker.live_bytes
        self._survivors = [life for life in self.tracker.lives if life.gone_at is None]

    def units(self) -> Iterator[UnitWork]:
        """What each takes, in the order of their first forwards; then those without one, and the root."""
        owners = {life: self._owner(life) for life in self._survivors}
        saved = Counter[_Point]()
        for life, owner in owners.items():
            saved[owner] += life.nbytes
        peaks = self._peaks(owners)
        for point in (*dict.fromkeys((*self._called, *self._points)), self._root):
            yield UnitWork(
                name=point.name,
                forward=point.forward,
                backward=point.backward,
                input_nbytes=point.input_nbytes,
                saved_nbytes=saved[point],
                forward_peak_nbytes=peaks[_Moment(point, is_backward=False)],
                backward_peak_nbytes=peaks[_Moment(point, is_backward=True)],
            )

    def _watch(self, module: nn.Module, point: _Point) -> None:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: self._enter(point, args, kwargs), with_kwargs=True, prepend=True
        )
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _enter(self, point: _Point, args: Any, kwargs: Any) -> None:
        self._under_way.append(point)
        self._nodes.belong_to(point)
        if self._has_turned:
            return
        self._called[point] = None
        floating = [tensor for tensor in tensors_among((args, kwargs)) if tensor.is_floating_point()]
        # Below frozen blocks the batch has no gradient.
        for tensor in [tensor for tensor in floating if tensor.requires_grad] or floating[:1]:
            life = self.tracker.life_of(tensor)
            if life is not None and life not in self._entered:
                self._entered.add(life)
                point.input_nbytes += life.nbytes

    def _leave(self) -> None:
        self._under_way.pop()
        self._nodes.belong_to(self._under_way[-1] if self._under_way else None)

    def _owner(self, life: StorageLife) -> _Point:
        keeping = self._kept.get(life)
        if keeping is not None and len(keeping.points) == 1:
            return next(iter(keeping.points))
        return self._moments[life.made_at - 1].point

    def _peaks(self, owners: Mapping[StorageLife, _Point]) -> Counter[_Moment]:
        """The most alive in each point's forward and backward, beside what is kept for others by then."""
        never = len(self._moments) + 1
        changes: list[list[tuple[_Point | None, int]]] = [[] for _ in range(never + 1)]
        for life in self.tracker.lives:
            end = never if life.gone_at is None else life.gone_at + 1
            changes[life.made_at].append((None, life.nbytes))
            changes[end].append((None, -life.nbytes))
            if life in owners:
                since = self._kept[life].since if life in self._kept else life.made_at + 1
                changes[since].append((owners[life], life.nbytes))
                changes[end].append((owners[life], -life.nbytes))
        live, kept_for, peaks = 0, Counter[_Point](), Counter[_Moment]()
        kept = 0
        for now, moment in enumerate(self._moments, start=1):
            for owner, nbytes in changes[now]:
                if owner is None:
                    live += nbytes
                else:
                    kept += nbytes
                    kept_for[owner] += nbytes
            peaks[moment] = max(peaks[moment], live - kept + kept_for[moment.point])
        return peaks


class _NodeOwners:
    """In whose forward each of autograd's nodes was made."""

    def __init__(self, root: _Point) -> None:
        self._first_numbers = [0]
        self._points: list[_Point | None] = [root]
        self._last_owner = root

    def belong_to(self, point: _Point | None) -> None:
        """Nodes that are made from now on. None: to the one whose node runs then, and computes something again."""
        self._first_numbers.append(torch._C._autograd._get_sequence_nr())
        self._points.append(point)

    def owner(self) -> _Point:
        """Whose the node is that runs in this thread; the last one's while none runs, or a gradient grows."""
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() != _NUMBER_OF_ACCUMULATION:
            index = bisect.bisect_right(self._first_numbers, node._sequence_nr()) - 1
            self._last_owner = self._points[index] or self._last_owner
        return self._last_owner

    @staticmethod
    def is_node_running() -> bool:
        """In this thread."""
        return torch._C._current_autograd_node() is not None
