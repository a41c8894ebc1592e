"""The seam between an optimizer's face, its native kernel and its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class Moment:
    """A state that an optimizer keeps of each element.

    Attributes
    ----------
    name : str
        As torch's `state_dict` names it.
    non_negative : bool
        Whether it is never negative; decides its 8-bit code.
    """

    name: str
    non_negative: bool = False


class Rule(Protocol):
    """An optimizer's arithmetic. Its native twin is `csrc/optim/rules/<name>.hpp`.

    Attributes
    ----------
    name : str
        Of the native kernel, and of `OffloadConfig.algorithm`.
    moments : tuple[Moment, ...]
        One or two.
    """

    name: str
    moments: tuple[Moment, ...]

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        """The kernel's scalars, in its order, from a param group at a step (1 for the first), in double."""

    def step(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, scalars: Sequence[float]
    ) -> None:
        """The reference: fp32 tensors, 1D, in place, in torch operations that round once each."""


@dataclass(frozen=True)
class StepScalars:
    """What a kernel needs to know for one parameter at one step.

    Attributes
    ----------
    rule : Rule
    values : tuple[float, ...]
        The rule's scalars; each is exactly an fp32 value.
    seed : int
        Of the noise that moments in fewer bits are rounded with, 32 bits.
    """

    rule: Rule
    values: tuple[float, ...]
    seed: int


def step_scalars(rule: Rule, group: Mapping[str, Any], step: int, grad_factor: float) -> StepScalars:
    """The scalars of a step, each rounded once from double. With `maximize`, gradients change their sign."""
    factor = -grad_factor if group["maximize"] else grad_factor
    values = tuple(float(np.float32(value)) for value in rule.scalars(group, step, factor))
    return StepScalars(rule, values, _mixed(step))


def _mixed(step: int) -> int:
    """Neighbouring steps give unrelated seeds: the finalizer of MurmurHash3 (Appleby, 2011), 32 bits."""
    x = step & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16


def rounded_sqrt(value: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of fp32 values.

    torch's own is off by one unit for a part of the values on some CPUs. A double has more than twice the digits and
    two more, so rounding its root again is right (Figueroa, "When is double rounding innocuous?", SIGNUM 1995).
    """
    return value.double().sqrt_().float()
