"""Dynamic loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import torch

from zerooffload.errors import ConfigError
from zerooffload.optim.optimizer import OffloadedOptimizer

_LARGEST_SCALE = torch.finfo(torch.float32).max
T = TypeVar("T", torch.Tensor, list[Any], tuple[Any, ...])


class GradScaler:
    """Multiplies the loss, so that small gradients survive fp16, and divides again in the optimizer's own pass.

    Methods, arguments and rule are those of `torch.amp.GradScaler` (Micikevicius et al., "Mixed Precision Training",
    2018), which cannot see offloaded gradients. If any gradient of any rank is infinite or NaN, `step` does nothing:
    no state changes, and the scale shrinks at the next `update`.

        scaler = zo.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                 # only if gradients are clipped or looked at
        zo.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    Parameters
    ----------
    init_scale : float
    growth_factor : float
        After `growth_interval` steps in a row that were not skipped, as far as fp32 reaches.
    backoff_factor : float
        After a skipped step.
    enabled : bool
        With False, every method does what it would without a scaler.

    Raises
    ------
    ConfigError
        If one of these is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._scale = _checked_scale("init_scale", init_scale)
        self._check_rule(growth_factor, backoff_factor, growth_interval)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._num_good_steps = 0
        self._finite: dict[int, bool] = {}
        self._stepped: set[int] = set()

    def scale(self, outputs: T) -> T:
        """A tensor, or each one in a list or tuple, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer: OffloadedOptimizer) -> None:
        """Divide the gradients of an optimizer by the scale, and find out whether all are finite.

        Raises
        ------
        ConfigError
            If that was done since the last `update`.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._finite:
            raise ConfigError("unscale_() was called for this optimizer already since the last update()")
        self._finite[id(optimizer)] = optimizer.unscale_gradients(1.0 / self._scale)

    def step(self, optimizer: OffloadedOptimizer, closure: Callable[[], float] | None = None) -> float | None:
        """`optimizer.step()`, unless a gradient is infinite or NaN; unscales first if that was not done.

        Returns
        -------
        float or None
            What the optimizer returned; None if the step was skipped.

        Raises
        ------
        ConfigError
            If it was called for this optimizer already since the last `update`, or with a closure.
        """
        if not self._enabled:
            return optimizer.step(closure)
        if closure is not None:
            raise ConfigError("a closure computes other gradients than those that were scaled: call step without one")
        if id(optimizer) in self._stepped:
            raise ConfigError("step() was called for this optimizer already since the last update()")
        if id(optimizer) not in self._finite:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        if self._finite[id(optimizer)]:
            return optimizer.step()
        optimizer.skip_step()
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale after the step of every optimizer, or set it.

        Raises
        ------
        ConfigError
            If no optimizer was stepped or unscaled, or the scale to set is out of range.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _checked_scale("new_scale", new_scale)
        elif not self._finite:
            raise ConfigError("update() without a step() or unscale_() before")
        elif not all(self._finite.values()):
            self._scale *= self._backoff_factor
            self._num_good_steps = 0
        else:
            self._num_good_steps += 1
            if self._num_good_steps >= self._growth_interval:
                if self._scale * self._growth_factor <= _LARGEST_SCALE:
                    self._scale *= self._growth_factor
                self._num_good_steps = 0
        self._finite.clear()
        self._stepped.clear()

    def get_scale(self) -> float:
        """The scale; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """What the scale is multiplied with when it grows."""
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied with after a skipped step."""
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        """Steps in a row after which the scale grows."""
        return self._growth_interval

    def state_dict(self) -> dict[str, Any]:
        """Torch's layout; empty if not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of ours or of torch's.

        Raises
        ------
        ConfigError
            If the state is of a scaler that was not enabled, lacks something, or a value is out of range. Nothing is
            taken over then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ConfigError("the state is empty: it is of a GradScaler that was not enabled")
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing:
            raise ConfigError(f"the state is none of a GradScaler: it lacks {', '.join(missing)}")
        rule = tuple(state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval"))
        scale, num_good_steps = _checked_scale("scale", state_dict["scale"]), int(state_dict["_growth_tracker"])
        self._check_rule(*rule)
        self._growth_factor, self._backoff_factor, self._growth_interval = rule
        self._scale, self._num_good_steps = scale, num_good_steps

    @staticmethod
    def _check_rule(growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
        if not 1 < growth_factor < inf:
            raise ConfigError(f"GradScaler: growth_factor={growth_factor!r} is out of range: more than 1")
        if not 0 < backoff_factor < 1:
            raise ConfigError(f"GradScaler: backoff_factor={backoff_factor!r} is out of range: between 0 and 1")
        if not growth_interval >= 1:
            raise ConfigError(f"GradScaler: growth_interval={growth_interval!r} is out of range: at least 1")


def _checked_scale(name: str, value: float | torch.Tensor) -> float:
    scale = float(value)
    if not 0 < scale <= _LARGEST_SCALE:
        raise ConfigError(f"GradScaler: {name}={scale!r} is out of range: more than 0, and finite in fp32")
    return scale
