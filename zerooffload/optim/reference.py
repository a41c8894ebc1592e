"""A whole step in torch operations that round once each: what every kernel equals bit for bit.

torch's own `lerp`, `addcmul` and `add(alpha=...)` round otherwise, so none of them appears here or in the rules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerooffload.optim import low_bits
from zerooffload.optim.record import MASTER, REMAINDER, exponents_name
from zerooffload.optim.rules import Moment, StepScalars

BLOCK_NUMEL = 4096
"""Elements of a block of the gradient norm."""
_NUM_LANES = 16

_NAN_BITS = 0x7FC00000


def step(
    scalars: StepScalars,
    param: torch.Tensor,
    record: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    first_index: int,
) -> None:
    """One step of a rule, in place.

    Parameters
    ----------
    param, grad : torch.Tensor
        1D `[numel]`; of any dtype that is trained, and of any floating dtype.
    record : Mapping[str, torch.Tensor]
        The optimizer's parts; see `OptimizerStates.parts`.
    first_index : int
        Of the first element in its shard; decides the noise that moments in fewer bits are rounded with.
    """
    master = param
    if REMAINDER.name in record:
        master = join_master(param, record[REMAINDER.name])
    elif MASTER.name in record:
        master = record[MASTER.name]
    moments = [read_moment(record, moment) for moment in scalars.rule.moments]
    scalars.rule.step(master, moments, grad.to(torch.float32), scalars.values)
    if REMAINDER.name in record:
        upper, remainder = split_master(master)
        param.copy_(upper)
        record[REMAINDER.name].copy_(remainder)
    elif MASTER.name in record:
        param.copy_(master)
    for number, (moment, value) in enumerate(zip(scalars.rule.moments, moments, strict=True)):
        if record[moment.name].dtype is not torch.float32:
            dither = low_bits.noise(first_index, value.numel(), scalars.seed, number, value.device)
            write_moment(record, moment, value, dither)


def read_moment(record: Mapping[str, torch.Tensor], moment: Moment) -> torch.Tensor:
    """A moment's values, fp32 `[numel]`, from whole blocks of a record; of an fp32 moment, itself."""
    stored = record[moment.name]
    if stored.dtype is torch.uint8:
        return low_bits.decode(stored, record[exponents_name(moment.name)], non_negative=moment.non_negative)
    return stored.to(torch.float32)


def write_moment(
    record: Mapping[str, torch.Tensor], moment: Moment, value: torch.Tensor, noise16: torch.Tensor | int
) -> None:
    """Replace a moment's values by fp32 ones, rounded by the noise; `NEAREST` keeps those that the format has."""
    stored = record[moment.name]
    if stored.dtype is torch.uint8:
        codes, exponents = low_bits.encode(value, noise16, non_negative=moment.non_negative)
        stored.copy_(codes)
        record[exponents_name(moment.name)].copy_(exponents)
    elif stored.dtype is torch.bfloat16:
        stored.copy_(low_bits.to_bf16(value, noise16))
    else:
        stored.copy_(value)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 to bf16 and int16 remainder, exactly, but for NaNs: all become one."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), torch.full_like(bits, _NAN_BITS), bits)
    upper = bits.add(0x8000).bitwise_right_shift(16)
    remainder = bits.sub(upper.bitwise_left_shift(16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), remainder


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of bf16 `param` and int16 `remainder`."""
    upper = param.view(torch.int16).to(torch.int32).bitwise_left_shift(16)
    return upper.add(remainder.to(torch.int32)).view(torch.float32)


def square_sums(grad: torch.Tensor) -> torch.Tensor:
    """Sums of squares by blocks of `BLOCK_NUMEL` elements of `grad` (1D): float64 `[ceil(numel / BLOCK_NUMEL)]`.

    A fixed tree: in a block, 16 lanes add every 16th square in rising order, then the lanes are halved pairwise.
    Squares of fp32 values are exact in float64.
    """
    num_blocks = -(-grad.numel() // BLOCK_NUMEL)
    padded = torch.zeros(num_blocks * BLOCK_NUMEL, dtype=torch.float64, device=grad.device)
    padded[: grad.numel()] = grad
    squares = padded.mul_(padded).view(num_blocks, BLOCK_NUMEL // _NUM_LANES, _NUM_LANES)
    lanes = torch.zeros(num_blocks, _NUM_LANES, dtype=torch.float64, device=grad.device)
    for row in range(BLOCK_NUMEL // _NUM_LANES):
        lanes += squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
