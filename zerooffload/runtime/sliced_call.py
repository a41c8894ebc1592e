"""A function of a batch, run in slices: forward keeps its inputs alone, backward computes each slice again.

[Note: in slices]
Forward runs the function slice by slice, joins the outputs, and lets each slice's graph go (it builds one, because
without gradients torch may choose other kernels). Backward runs it again for one slice after the other, in the same
order, with the random state that the slice had, and takes its gradients. So activations are those of one slice, and the
parameters that the function uses need to be there once in each direction. What all slices share (parameters, position
biases) gets the sum of their gradients in the order of the slices, in fp32 where it has fewer bits, rounded once to its
own dtype: autograd sees one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn

from zerooffload.accelerator import Accelerator
from zerooffload.errors import ConfigError, InternalError
from zerooffload.runtime.slicing import Cut, Leaf, Rebuild, Rule, take_apart


class Joining(Enum):
    """What becomes of a tensor that each slice returns."""

    BATCH = "batch"
    """The slices' follow one another in dimension 0."""
    SHARED = "shared"
    """All have the same: the first one's is taken."""
    ADDED = "added"
    """They add up, in the order of the slices."""


class Kept(Protocol):
    """The first tensor of a call, from its forward to its backward.

    Attributes
    ----------
    is_away : bool
        Whether it is elsewhere: who wants it back calls `bring`. Else autograd keeps it.
    """

    is_away: bool

    def bring(self) -> torch.Tensor:
        """The tensor, where it was, for compute."""

    def release(self) -> None:
        """It is not needed any more; again is harmless."""


class KeptByAutograd:
    """A tensor that stays where it is. See `Kept`."""

    is_away = False

    def bring(self) -> torch.Tensor:
        """Never asked for."""
        raise InternalError("a tensor that autograd keeps was asked for elsewhere")

    def release(self) -> None:
        """Nothing of ours is held."""


@dataclass(frozen=True)
class OutputRules:
    """What becomes of each tensor that the function returns, and which of them have gradients."""

    rules: tuple[Joining, ...]
    differentiable: tuple[bool, ...]


@dataclass(frozen=True)
class SlicedFunction:
    """What a call runs in slices.

    Attributes
    ----------
    name : str
        Of the unit, for messages.
    run : callable
        The function, of args and kwargs.
    params : tuple[torch.nn.Parameter, ...]
        Trainable ones that it uses.
    keep : callable
        Keeps the batch until backward.
    between_slices : callable
        Called in backward after each slice.
    """

    name: str
    run: Callable[..., Any]
    params: tuple[nn.Parameter, ...]
    accelerator: Accelerator
    keep: Callable[[torch.Tensor], Kept]
    between_slices: Callable[[], None]


class SlicedCall:
    """One call: its arguments but for the tensors, how it is cut, and what it returned but for the tensors."""

    def __init__(
        self, function: SlicedFunction, leaves: Sequence[Leaf], rebuild: Rebuild, cut: Cut, outputs: OutputRules
    ) -> None:
        self.function = function
        self.cut = cut
        self.outputs = outputs
        self._rebuild = rebuild
        # Tensors are autograd's to keep: what holds this call must not hold them.
        self._plain = [None if isinstance(leaf.value, torch.Tensor) else leaf.value for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf.value, torch.Tensor)]
        self.rules = [cut.rules[place] for place in self._places]
        self.first = self.rules.index(Rule.BATCH)
        self._autocast = autocast_state(function.accelerator)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run it on the tensors among its arguments; what it returns, for the whole batch."""
        made: list[Rebuild] = []
        apply: Callable[..., tuple[torch.Tensor, ...]] = _InSlices.apply
        joined = apply(self, made, *tensors, *self.function.params)
        return made[0](iter(joined))

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Rebuild]:
        """Run one slice, with a graph: the tensors that it returns, and what puts others in their places."""
        values = list(self._plain)
        for place, tensor in zip(self._places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = self._rebuild(iter(values))
        with torch.enable_grad(), in_autocast(self._autocast):
            return tensors_apart(self.function.run(*args, **kwargs))

    def of_slice(self, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], rows: slice) -> list[torch.Tensor]:
        """What a slice gets of each tensor, as leaves of a graph of its own; `wanted` are the gradients of which."""
        return [
            (tensor[rows] if rule is Rule.BATCH else tensor).detach().requires_grad_(is_wanted)
            for tensor, rule, is_wanted in zip(tensors, self.rules, wanted, strict=True)
        ]


def tensors_apart(value: Any) -> tuple[list[torch.Tensor], Rebuild]:
    """The tensors in a function's result, and what puts others in their places."""
    leaves, rebuild = take_apart(value, "output")
    tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    plain = [None if isinstance(leaf.value, torch.Tensor) else leaf.value for leaf in leaves]
    is_tensor = [isinstance(leaf.value, torch.Tensor) for leaf in leaves]

    def with_tensors(others: Iterator[torch.Tensor]) -> Any:
        return rebuild(next(others) if there else item for there, item in zip(is_tensor, plain, strict=True))

    return tensors, with_tensors


class _InSlices(torch.autograd.Function):
    """See [Note: in slices]."""

    @staticmethod
    def forward(ctx: Any, call: SlicedCall, made: list[Rebuild], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = tensors[: len(call.rules)]
        joined: list[torch.Tensor] = []
        random_states = []
        for rows in call.cut.slices:
            random_states.append(random_state(call.function.accelerator))
            outputs, rebuild = call.run(call.of_slice(arguments, ctx.needs_input_grad[2:][: len(arguments)], rows))
            if not made:
                made.append(rebuild)
                joined = _rooms_for(call, outputs)
            _join(call, joined, outputs, rows)
        if not any(ctx.needs_input_grad):
            return tuple(joined)
        ctx.call, ctx.random_states = call, random_states
        ctx.kept = kept = call.function.keep(arguments[call.first])
        ctx.save_for_backward(
            *(None if kept.is_away and index == call.first else tensor for index, tensor in enumerate(arguments))
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                out
                for out, differentiable in zip(joined, call.outputs.differentiable, strict=True)
                if not differentiable
            )
        )
        return tuple(joined)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        call: SlicedCall = ctx.call
        arguments = list(ctx.saved_tensors)
        if ctx.kept.is_away:
            arguments[call.first] = ctx.kept.bring()
        wanted = list(ctx.needs_input_grad[2:])
        sums = _Sums(call, arguments, wanted)
        with _random_state_restored(call.function.accelerator):
            for number, rows in enumerate(call.cut.slices):
                set_random_state(call.function.accelerator, ctx.random_states[number])
                sums.add(rows, _slice_gradients(call, arguments, wanted, grads, number))
                call.function.between_slices()
        del arguments
        ctx.kept.release()
        return None, None, *sums.gradients()


def _rules(call: SlicedCall, outputs: Sequence[torch.Tensor]) -> tuple[Joining, ...]:
    if len(outputs) != len(call.outputs.rules):
        raise ConfigError(
            f"unit {call.function.name} returned {len(outputs)} tensors, and {len(call.outputs.rules)} before: what it"
            " returns depends on the data, so it cannot run in slices"
        )
    return call.outputs.rules


def _rooms_for(call: SlicedCall, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    num_slices = call.cut.batch_size // call.cut.slice_size
    return [
        output.detach().new_empty((len(output) * num_slices, *output.shape[1:]))
        if rule is Joining.BATCH
        else torch.empty_like(output.detach())
        for output, rule in zip(outputs, _rules(call, outputs), strict=True)
    ]


def _join(call: SlicedCall, joined: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], rows: slice) -> None:
    for target, output, rule in zip(joined, outputs, _rules(call, outputs), strict=True):
        if rule is not Joining.BATCH:
            if rows.start == 0:
                target.copy_(output.detach())
            elif rule is Joining.ADDED:
                target.add_(output.detach())
            continue
        part = _rows_of(target, rows, call.cut)
        if part.shape != output.shape:
            raise ConfigError(
                f"unit {call.function.name} returned a tensor of shape {tuple(output.shape)} for one slice and"
                f" {tuple(part.shape)} for another: it depends on the data, so it cannot run in slices"
            )
        part.copy_(output.detach())


def _rows_of(whole: torch.Tensor, rows: slice, cut: Cut) -> torch.Tensor:
    """A slice's part of a joined output, which may have several rows a sample."""
    per_sample = len(whole) // cut.batch_size
    return whole[rows.start * per_sample : rows.stop * per_sample]


def _slice_gradients(
    call: SlicedCall,
    arguments: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor | None],
    number: int,
) -> list[torch.Tensor | None]:
    """Compute a slice again: the gradients of the arguments and parameters that are wanted."""
    rows = call.cut.slices[number]
    own = call.of_slice(arguments, wanted[: len(arguments)], rows)
    outputs, _ = call.run(own)
    ends, end_grads = [], []
    for output, grad, rule in zip(outputs, grads, _rules(call, outputs), strict=True):
        if grad is None or not output.requires_grad or (rule is Joining.SHARED and number):
            continue
        ends.append(output)
        end_grads.append(_rows_of(grad, rows, call.cut) if rule is Joining.BATCH else grad)
    if not ends:
        return [None] * len(wanted)
    sources = [source for source, is_wanted in zip((*own, *call.function.params), wanted, strict=True) if is_wanted]
    found = iter(torch.autograd.grad(ends, sources, end_grads, allow_unused=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]


class _Sums:
    """Gradients of all arguments and parameters, while slice after slice adds to them."""

    def __init__(self, call: SlicedCall, arguments: Sequence[torch.Tensor], wanted: Sequence[bool]) -> None:
        self._targets: list[torch.Tensor] = [*arguments, *call.function.params]
        self._is_batch = [rule is Rule.BATCH for rule in call.rules] + [False] * len(call.function.params)
        self._num_slices = [0] * len(wanted)
        self._sums: list[torch.Tensor | None] = [None] * len(wanted)

    def add(self, rows: slice, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take those of a slice."""
        for index, grad in enumerate(gradients):
            if grad is None:
                continue
            if self._is_batch[index]:
                self._put(index, rows, grad)
            else:
                self._sums[index] = self._added(index, grad)
            self._num_slices[index] += 1

    def _put(self, index: int, rows: slice, grad: torch.Tensor) -> None:
        whole = self._sums[index]
        if rows.stop - rows.start == len(self._targets[index]):
            self._sums[index] = grad
            return
        if whole is None:
            whole = self._sums[index] = torch.zeros_like(self._targets[index])
        whole[rows] = grad

    def _added(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        so_far, num_slices = self._sums[index], self._num_slices[index]
        if so_far is None:
            return grad
        if num_slices == 1:
            # What autograd handed over may be another tensor's memory too.
            return _widened(so_far) + grad
        return so_far.add_(grad)

    def gradients(self) -> list[torch.Tensor | None]:
        """Each in the dtype of what it belongs to."""
        return [
            None if total is None else total.to(target.dtype)
            for total, target in zip(self._sums, self._targets, strict=True)
        ]


def _widened(grad: torch.Tensor) -> torch.Tensor:
    """To fp32 at least."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


RandomState = tuple[torch.Tensor, torch.Tensor | None]


def random_state(accelerator: Accelerator) -> RandomState:
    """Of the host's and the device's generators."""
    return torch.get_rng_state(), accelerator.random_state()


def set_random_state(accelerator: Accelerator, state: RandomState) -> None:
    """Let random numbers go on from there."""
    of_host, of_device = state
    torch.set_rng_state(of_host)
    if of_device is not None:
        accelerator.set_random_state(of_device)


@contextmanager
def _random_state_restored(accelerator: Accelerator) -> Iterator[None]:
    state = random_state(accelerator)
    try:
        yield
    finally:
        set_random_state(accelerator, state)


@dataclass(frozen=True)
class Autocast:
    """Whether operations choose their dtypes on a kind of device, and which they choose."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


def autocast_state(accelerator: Accelerator) -> list[Autocast]:
    """That of the calling thread."""
    kinds = dict.fromkeys(("cpu", accelerator.device.type))
    return [Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def in_autocast(states: Sequence[Autocast]) -> Iterator[None]:
    """With casts of parameters made anew: one that was made without a graph has no gradient."""
    with ExitStack() as stack:
        for state in states:
            choose = torch.autocast(state.device_type, state.dtype, state.enabled, cache_enabled=False)
            stack.enter_context(choose)
        yield
