"""Loops in which everything happens that can make what was begun ahead, or is hidden, wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from support.reference_training import current_params
from support.small_models import batch, branching
from torch import nn

import zerooffload as zo
from zerooffload.runtime.build import Environment, build_run
from zerooffload.runtime.ordinary_calls import make_ordinary_calls_right

NUM_STEPS = 6
SKIPPED_STEP = 2
"""In which the loss is infinite, with fp16."""
ACCUMULATION = {
    "one backward": (1, None, False),
    "one backward, told": (1, 1, False),
    "four, told": (4, 4, False),
    "four, no_sync": (4, None, True),
    "four, untold": (4, None, False),
}
"""Backwards to a step, what `accumulation_steps` says, and whether `no_sync` is used."""
CLIPS = ("never", "sometimes", "always")
DTYPES = (None, "bf16", "fp16")


@dataclass
class Moments:
    """What a loop does besides training; each is given the training and the step's number.

    Attributes
    ----------
    num_backwards : callable
        In the step, given the usual number.
    after_backward, after_step, after_zero_grad : callable
    """

    num_backwards: Callable[[int, int], int] = lambda usual, _step: usual
    after_backward: Callable[[Training, int], None] = lambda _training, _step: None
    after_step: Callable[[Training, int], None] = lambda _training, _step: None
    after_zero_grad: Callable[[Training, int], None] = lambda _training, _step: None


@dataclass(frozen=True)
class Loop:
    """A training of `build`'s model; the fields are keys of the tables above."""

    accumulation: str = "one backward"
    clip: str = "never"
    dtype: str | None = None
    moments: Moments = field(default_factory=Moments, compare=False)
    name: str = ""
    build: Callable[[], nn.Module] = branching
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, tokens: model(tokens)
    lr: Callable[[], float | torch.Tensor] = lambda: 1e-2
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()


class Training:
    """A model, its optimizer, and what must be equal, to the bit, whenever updates run."""

    def __init__(self, loop: Loop, max_norm: float | None, environment: Environment | None, config: Any) -> None:
        self.loop = loop
        self.max_norm = max_norm
        self.found: list[Any] = []
        self.norms: list[float] = []
        num_backwards, told, self.uses_no_sync = ACCUMULATION[loop.accumulation]
        self.num_backwards = num_backwards
        self.model = loop.build()
        defaults = {"threads": 1, "overwrite": True, "compute_dtype": loop.dtype, "accumulation_steps": told}
        settings = zo.OffloadConfig(**{**defaults, **config})
        if environment is None:
            zo.offload(self.model, settings)
        else:
            make_ordinary_calls_right(self.model, build_run(self.model, settings, environment))
        self.optimizer = zo.AdamW(loop.groups(self.model), lr=loop.lr(), betas=(0.9, 0.99), weight_decay=0.1)
        self.scaler = zo.GradScaler(init_scale=64.0, growth_interval=2, enabled=loop.dtype == "fp16")

    def backward(self, step: int, number: int, *, scale: float = 1.0) -> None:
        """One micro-step."""
        loss = self.loop.loss(self.model, batch(step, number))
        self.found.append(loss.item())
        self.scaler.scale(loss * scale).backward()

    def step(self, step: int) -> None:
        """From the first forward to `zero_grad`, and what the loop does in between."""
        usual = self.num_backwards
        number = self.loop.moments.num_backwards(usual, step)
        overflows = self.scaler.is_enabled() and step == SKIPPED_STEP
        for index in range(number):
            is_last = index == number - 1
            with zo.no_sync(self.model) if self.uses_no_sync and not is_last else nullcontext():
                self.backward(step, index, scale=math.inf if overflows and is_last else 1.0 / usual)
        self.loop.moments.after_backward(self, step)
        self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            self.norms.append(float(zo.clip_grad_norm_(self.model, self.max_norm)))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loop.moments.after_step(self, step)
        self.optimizer.zero_grad()
        self.loop.moments.after_zero_grad(self, step)

    def ending(self) -> list[Any]:
        """Everything that was seen, and all states."""
        return [self.found, self.norms, current_params(self.model), self.optimizer_states()]

    def optimizer_states(self) -> dict[int, dict[str, torch.Tensor]]:
        """By number of the parameter."""
        found: dict[int, dict[str, torch.Tensor]] = self.optimizer.state_dict()["state"]
        return found


def run(
    loop: Loop, environment: Environment | None = None, *, max_norm: float | None = None, **config: Any
) -> list[Any]:
    """What a training comes to."""
    training = Training(loop, max_norm, environment, config)
    try:
        for step in range(NUM_STEPS):
            training.step(step)
        return training.ending()
    finally:
        zo.close(training.model)


class References:
    """What loops come to where nothing is hidden; each is done once.

    By what `clip` says the norm is bounded by none, by the median of the norms, or by less than all of them.
    """

    def __init__(self) -> None:
        self._done: dict[tuple[Any, ...], tuple[float | None, list[Any]]] = {}

    def of(self, loop: Loop) -> tuple[float | None, list[Any]]:
        """The bound of norms, and what comes out."""
        key = (loop.accumulation, loop.clip, loop.dtype, loop.name)
        if key not in self._done:
            max_norm = self._max_norm(loop)
            self._done[key] = max_norm, run(loop, max_norm=max_norm, update="after_backward")
        return self._done[key]

    def _max_norm(self, loop: Loop) -> float | None:
        if loop.clip == "always":
            return 1e-7
        if loop.clip == "never":
            return 1e9
        norms = run(loop, max_norm=1e9, update="after_backward")[1]
        return float(median(norm for norm in norms if math.isfinite(norm)))


def differences(name: str, one: Any, other: Any) -> list[str]:
    """Between values and tensors in lists and dictionaries; NaN equals itself."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{name}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [text for key in one for text in differences(f"{name}[{key}]", one[key], other[key])]
    if isinstance(one, list):
        if len(one) != len(other):
            return [f"{name}: {len(one)} and {len(other)}"]
        return [
            text for i, pair in enumerate(zip(one, other, strict=True)) for text in differences(f"{name}[{i}]", *pair)
        ]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0)) else [f"{name} differs"]
    return [] if one == other or (one != one and other != other) else [f"{name}: {one!r} != {other!r}"]  # noqa: PLR0124


@contextmanager
def _edited(training: Training, module: str, *, grads: bool = False) -> Iterator[nn.Module]:
    part = training.model.get_submodule(module)
    with torch.no_grad(), zo.full_params(part, grads=grads):
        yield part


def _edit_weights(training: Training, step: int) -> None:
    if step % 2:
        with _edited(training, "blocks.0") as block:
            block[0].weight.mul_(0.75)


def _edit_gradients(training: Training, step: int) -> None:
    if step % 2:
        with _edited(training, "blocks.0", grads=True) as block:
            block[0].weight.grad.mul_(0.5)


def _change_lr(training: Training, step: int) -> None:
    if step % 2:
        for group in training.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5


def _discard(training: Training, step: int) -> None:
    """A backward for nothing, and then the real one."""
    if step % 3 == 1:
        training.optimizer.zero_grad()
        for index in range(training.num_backwards):
            training.backward(step, 10 + index)


def _discard_by_the_model(training: Training, step: int) -> None:
    if step % 3 == 1:
        training.model.zero_grad()
        for index in range(training.num_backwards):
            training.backward(step, 10 + index)


def _evaluate(training: Training, step: int) -> None:
    with torch.no_grad():
        training.model.eval()
        training.found.append(training.loop.loss(training.model, batch(100 + step, 0)).item())
        training.model.train()


def _evaluate_at_times(training: Training, step: int) -> None:
    if step % 2:
        _evaluate(training, step)


def _read(training: Training, _step: int) -> None:
    state = training.model.state_dict()
    training.found.append({name: value.clone() for name, value in state.items()})


def _read_optimizer(training: Training, _step: int) -> None:
    training.found.append(training.optimizer_states())


def _read_whole(training: Training, step: int) -> None:
    with zo.full_params(training.model.get_submodule(f"blocks.{step % 3}"), writeback=False):
        block = training.model.get_submodule(f"blocks.{step % 3}")
        training.found.append([param.detach().clone() for param in block.parameters()])


def _load(training: Training, step: int) -> None:
    if step % 2:
        state = {name: value.clone().mul_(0.9) for name, value in training.model.state_dict().items()}
        training.model.load_state_dict(state)


def _load_optimizer(training: Training, step: int) -> None:
    if step % 2:
        state = training.optimizer.state_dict()
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"] * 0.5
        training.optimizer.load_state_dict(state)


def _step_again(training: Training, step: int) -> None:
    """With the same gradients."""
    if step % 2:
        training.optimizer.step()


def _lose_gradients(training: Training, step: int) -> None:
    """Of single parameters, after backward."""
    if step % 2:
        training.model.get_parameter("blocks.0.0.weight").grad = None


def _clip_a_part(training: Training, step: int) -> None:
    if step % 2:
        training.found.append(float(zo.clip_grad_norm_(training.model.get_submodule("blocks.2"), 1e-3)))


def _clip_after_the_step(training: Training, step: int) -> None:
    """Somebody who looks at the norm late."""
    if step % 2:
        training.found.append(float(zo.clip_grad_norm_(training.model.get_submodule("blocks.2"), 1e9)))


def _look_into_gradients(training: Training, _step: int) -> None:
    with zo.full_params(training.model.get_submodule("blocks.0"), grads=True, writeback=False):
        grad = training.model.get_parameter("blocks.0.0.weight").grad
        training.found.append(None if grad is None else grad.detach().clone())


def _backward_that_raises(training: Training, step: int) -> None:
    if step % 3 != 1:
        return

    def refuse(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    training.optimizer.zero_grad()
    handle = training.model.get_submodule("blocks.0").register_forward_hook(
        lambda _module, _args, output: output.register_hook(refuse) and None
    )
    try:
        training.backward(step, 20)
    except ZeroDivisionError:
        pass
    finally:
        handle.remove()
    training.optimizer.zero_grad()
    for index in range(training.num_backwards):
        training.backward(step, 10 + index)


def _only_a_part(training: Training, step: int) -> None:
    """A second backward that reaches one block alone."""
    if step % 2:
        block = training.model.get_submodule("blocks.2")
        loss = block(torch.ones(2, 32, dtype=next(block.parameters()).dtype)).float().pow(2).mean()
        training.found.append(loss.item())
        training.scaler.scale(loss).backward()


def _other_hyperparameters(training: Training, step: int) -> None:
    training.optimizer.param_groups[0]["weight_decay"] = 0.1 * (step % 2)


MOMENTS: dict[str, Moments] = {
    "weights edited before the step": Moments(after_backward=_edit_weights),
    "weights edited after the step": Moments(after_step=_edit_weights),
    "weights edited before the next forward": Moments(after_zero_grad=_edit_weights),
    "gradients edited": Moments(after_backward=_edit_gradients),
    "gradients looked at": Moments(after_backward=_look_into_gradients),
    "gradients looked at after the step": Moments(after_step=_look_into_gradients),
    "learning rate changed before the step": Moments(after_backward=_change_lr),
    "learning rate changed after the step": Moments(after_step=_change_lr),
    "weight decay changed before the step": Moments(after_backward=_other_hyperparameters),
    "gradients discarded": Moments(after_backward=_discard),
    "gradients discarded by the model": Moments(after_backward=_discard_by_the_model),
    "one backward more": Moments(num_backwards=lambda usual, step: usual + step % 2),
    "one backward less": Moments(num_backwards=lambda usual, step: max(1, usual - step % 2)),
    "another backward through a part": Moments(after_backward=_only_a_part),
    "a backward that raises": Moments(after_backward=_backward_that_raises),
    "evaluation": Moments(after_zero_grad=_evaluate_at_times),
    "evaluation before zero_grad": Moments(after_step=_evaluate),
    "evaluation before the step": Moments(after_backward=_evaluate),
    "state_dict": Moments(after_step=_read),
    "state_dict before the step": Moments(after_backward=_read),
    "the optimizer's state_dict": Moments(after_step=_read_optimizer),
    "the optimizer's state_dict before the step": Moments(after_backward=_read_optimizer),
    "full_params": Moments(after_step=_read_whole),
    "load_state_dict": Moments(after_step=_load),
    "load_state_dict before the step": Moments(after_backward=_load),
    "the optimizer's load_state_dict": Moments(after_step=_load_optimizer),
    "the optimizer's load_state_dict before the step": Moments(after_backward=_load_optimizer),
    "a second step": Moments(after_step=_step_again),
    "gradients of single parameters lost": Moments(after_backward=_lose_gradients),
    "a part clipped apart": Moments(after_backward=_clip_a_part),
    "a norm after the step": Moments(after_step=_clip_after_the_step),
}


def rows_of_all_pairs(*axes: list[Any]) -> list[tuple[Any, ...]]:
    """Few rows in which each value of an axis meets each value of every other one."""
    numbers = range(len(axes))
    pairs = [
        (i, a, j, b)
        for i in numbers
        for j in numbers
        if i < j
        for a in range(len(axes[i]))
        for b in range(len(axes[j]))
    ]
    left = dict.fromkeys(pairs)
    rows = []
    while left:
        i, a, j, b = next(iter(left))
        row = {i: a, j: b}
        for axis in numbers:
            if axis not in row:
                row[axis] = max(range(len(axes[axis])), key=lambda value: _num_new(left, row, axis, value))
        for pair in list(_pairs_of(row)):
            left.pop(pair, None)
        rows.append(tuple(axes[axis][row[axis]] for axis in numbers))
    return rows


def rows_of_a_product(*axes: list[Any], num_whole: int) -> list[tuple[Any, ...]]:
    """The product of the first axes; the values of the others go round, each at its own pace."""
    whole, others = axes[:num_whole], axes[num_whole:]
    return [
        (*row, *(axis[number // (7**place) % len(axis)] for place, axis in enumerate(others)))
        for number, row in enumerate(itertools.product(*whole))
    ]


def _num_new(left: dict[tuple[int, int, int, int], None], row: dict[int, int], axis: int, value: int) -> int:
    return sum(pair in left for pair in _pairs_of({**row, axis: value}) if axis in (pair[0], pair[2]))


def _pairs_of(row: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
    chosen = sorted(row.items())
    return ((i, a, j, b) for number, (i, a) in enumerate(chosen) for j, b in chosen[number + 1 :])
