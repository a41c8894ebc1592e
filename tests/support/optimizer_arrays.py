"""A parameter, its record and a gradient in any format, to step on; and whether two of them are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zerooffload.optim import low_bits, reference
from zerooffload.optim.record import MASTER, REMAINDER, OptimizerStates, exponents_name
from zerooffload.optim.rules import RULES, StepScalars
from zerooffload.optim.rules.rule import step_scalars

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOMENTS: tuple[Literal["fp32", "bf16", "8bit"], ...] = ("fp32", "bf16", "8bit")
GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
    "lr_decay": 0.1,
    "initial_accumulator_value": 0.1,
    "momentum": 0.9,
    "dampening": 0.3,
    "nesterov": True,
}
"""Hyperparameters of every rule."""

_SPECIAL = [0.0, -0.0, 1e-45, -1e-39, 1.17549435e-38, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
_BLOCK_NUMEL = low_bits.SCALE_BLOCK_NUMEL


@dataclass
class Arrays:
    """All 1D `[numel]`, but exponents."""

    param: torch.Tensor
    record: dict[str, torch.Tensor]
    grad: torch.Tensor

    def copy(self) -> Arrays:
        record = {name: value.clone() for name, value in self.record.items()}
        return Arrays(self.param.clone(), record, self.grad.clone())

    def part(self, start: int, stop: int) -> Arrays:
        """Views; `start` on a multiple of 128 if there are exponents."""
        of_blocks = slice(start // _BLOCK_NUMEL, -(-stop // _BLOCK_NUMEL))
        record = {
            name: value[of_blocks if name.endswith("_exponents") else slice(start, stop)]
            for name, value in self.record.items()
        }
        return Arrays(self.param[start:stop], record, self.grad[start:stop])


def scalars_of(algorithm: str, step: int = 3, grad_factor: float = 0.7) -> StepScalars:
    return step_scalars(RULES[algorithm], GROUP, step, grad_factor)


def make_arrays(
    states: OptimizerStates, dtypes: tuple[torch.dtype, torch.dtype], numel: int, *, seed: int = 0, head: int = 0
) -> Arrays:
    """Views that start `head` elements into their storage, for a parameter's and a gradient's dtype.

    Blocks of 128 elements are of very different sizes; in one of eight there are infinities, NaNs and other special
    values.
    """
    param_dtype, grad_dtype = dtypes
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-numel // _BLOCK_NUMEL)
    kind = torch.randint(0, 8, (num_blocks,), generator=generator)
    sizes = torch.tensor([1.0, 1e-3, 10.0, 1e-38, 1e-20, 1e30, 0.0, 1.0])[kind]
    sizes = sizes.repeat_interleave(_BLOCK_NUMEL)[:numel]
    is_special = (kind == 7).repeat_interleave(_BLOCK_NUMEL)[:numel]

    def values() -> torch.Tensor:
        ordinary = torch.randn(numel, generator=generator) * sizes
        special = torch.tensor(_SPECIAL)[torch.randint(0, len(_SPECIAL), (numel,), generator=generator)]
        chosen = is_special & (torch.rand(numel, generator=generator) < 0.05)
        return torch.where(chosen, special, ordinary)

    def placed(value: torch.Tensor) -> torch.Tensor:
        storage = torch.zeros(head + value.numel(), dtype=value.dtype)
        storage[head:] = value
        return storage[head:]

    master = values()
    record: dict[str, torch.Tensor] = {}
    param = master.to(param_dtype)
    if param_dtype is torch.bfloat16:
        param, record[REMAINDER.name] = reference.split_master(master)
    elif param_dtype is torch.float16:
        record[MASTER.name] = master
    for moment in RULES[states.algorithm].moments:
        value = values()
        for part in states.parts(param_dtype):
            if part.name in (moment.name, exponents_name(moment.name)):
                record[part.name] = torch.zeros(part.num_items(numel), dtype=part.dtype)
        reference.write_moment(record, moment, value.abs() if moment.non_negative else value, low_bits.NEAREST)
    placed_record = {name: placed(value) for name, value in record.items()}
    return Arrays(placed(param), placed_record, placed(values().to(grad_dtype)))


def difference(got: Arrays, expected: Arrays) -> str:
    """Where they are not equal to the bit; empty if nowhere.

    NaNs count as equal, for the payload of one that is made from two others is not promised, and so do the codes of
    8-bit blocks that are NaN.
    """
    assert got.record.keys() == expected.record.keys()
    pairs = {"param": (got.param, expected.param), "grad": (got.grad, expected.grad)}
    pairs |= {name: (got.record[name], expected.record[name]) for name in got.record}
    for name, (one, other) in pairs.items():
        assert one.dtype is other.dtype
        differs = one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
        differs = differs.view(one.numel(), one.element_size()).any(1)
        if one.is_floating_point():
            differs &= ~(one.isnan() & other.isnan())
        exponents = got.record.get(exponents_name(name))
        if exponents is not None:
            differs &= (exponents != 255).repeat_interleave(_BLOCK_NUMEL)[: one.numel()]
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            return f"{name}[{at}]: got {one[at]}, expected {other[at]} ({int(differs.sum())} differ)"
    return ""
