"""The optimizer's arithmetic in torch operations that round once each: what every kernel equals bit for bit.

torch's own `lerp`, `addcmul` and `add(alpha=...)` round otherwise, and its CUDA division by a Python number multiplies
by the reciprocal, so none of them appears here.
"""

from __future__ import annotations

import torch

from zerooffload.optim.scalars import AdamWScalars

BLOCK_NUMEL = 4096
"""Elements of a block of the gradient norm."""
_NUM_LANES = 16

_NAN_BITS = 0x7FC00000


def adamw_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamWScalars,
) -> None:
    """One AdamW step on fp32 `param`, in place; all tensors 1D `[numel]`, `grad` of any floating dtype."""
    g = grad.to(torch.float32).mul(scalars.grad_factor)
    exp_avg.mul_(scalars.beta1).add_(g.mul(scalars.one_minus_beta1))
    exp_avg_sq.mul_(scalars.beta2).add_(g.mul(g).mul_(scalars.one_minus_beta2))
    bias2_sqrt = torch.full((), scalars.bias2_sqrt, dtype=torch.float32, device=param.device)
    denominator = _rounded_sqrt(exp_avg_sq).div_(bias2_sqrt).add_(scalars.eps)
    param.mul_(scalars.decay).sub_(exp_avg.div(denominator).mul_(scalars.step_size))


def _rounded_sqrt(value: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of fp32 values.

    torch's own is off by one unit for a part of the values on some CPUs. A double has more than twice the digits and
    two more, so rounding its root again is right (Figueroa, "When is double rounding innocuous?", SIGNUM 1995).
    """
    return value.double().sqrt_().float()


def adamw_step_bf16(  # noqa: PLR0917 - the arrays of one record
    param: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamWScalars,
) -> None:
    """The same on the fp32 master that bf16 `param` and int16 `remainder` make up; see [Note: master weights]."""
    master = join_master(param, remainder)
    adamw_step(master, exp_avg, exp_avg_sq, grad, scalars)
    new_param, new_remainder = split_master(master)
    param.copy_(new_param)
    remainder.copy_(new_remainder)


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
