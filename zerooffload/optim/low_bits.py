"""Moments in fewer bits: what the native kernels do, in torch operations.

[Note: stochastic rounding]
A moving average changes by less than half of a low-bit number's last place in most steps: rounded to nearest it would
stand still. Adding noise, uniform in one last place, and cutting off is right on average. The noise is a hash of the
element's index in its shard and of the step, so it does not depend on threads, chunks, tiers or the CPU.

[Note: 8-bit moments]
Blocks of 128 elements share a scale, the power of two at or below the largest magnitude in them, kept as a float's
exponent bits (block-wise quantization: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; powers of
two: the OCP Microscaling formats, 2023). Of x / scale a code keeps the upper bits of a float: three bits of mantissa,
and sign and 4 bits of exponent, or 5 bits of exponent where a moment is never negative. What is not negative and not 0
gets a code that is not 0, since 0 would mean a division by eps (Li et al., "Memory Efficient Optimizers with 4-bit
States", 2023). A NaN or infinity makes its whole block NaN.
"""

from __future__ import annotations

import torch

SCALE_BLOCK_NUMEL = 128
"""Elements that share a scale."""
NEAREST = 0x8000
"""Noise with which rounding is to nearest; of numbers that the format has, it changes nothing."""

_MASK = 0xFFFFFFFF
_MANTISSA_SHIFT = 20
_LARGEST_EXPONENT = 254


def noise(first_index: int, numel: int, seed: int, moment: int, device: torch.device) -> torch.Tensor:
    """16 bits for each element from `first_index` on, int64 `[numel]`; for the first or the second moment."""
    x = torch.arange(first_index, first_index + numel, device=device)
    x = (x.bitwise_and_(_MASK).mul_(0x9E3779B1).add_(seed)).bitwise_and_(_MASK)
    x = x.bitwise_xor_(x.bitwise_right_shift(15)).mul_(0x85EBCA77)
    return x.bitwise_right_shift_(0 if moment else 16).bitwise_and_(0xFFFF)


def to_bf16(value: torch.Tensor, noise16: torch.Tensor | int) -> torch.Tensor:
    """fp32 to bf16, rounded by the noise; every NaN becomes one."""
    bits = _bits(value).add_(noise16).bitwise_right_shift_(16)
    bits.masked_fill_(value.isnan(), 0x7FC0)
    return _as_int(bits, torch.int16).view(torch.bfloat16)


def decode(codes: torch.Tensor, exponents: torch.Tensor, *, non_negative: bool) -> torch.Tensor:
    """8-bit codes, uint8 `[numel]`, and their blocks' exponents, uint8 `[ceil(numel / 128)]`, to fp32."""
    code = codes.to(torch.int64)
    bits = code << _MANTISSA_SHIFT if non_negative else (code & 0x7F) << _MANTISSA_SHIFT | (code & 0x80) << 24
    scale = _power_of_two(exponents.to(torch.int64))
    scale.masked_fill_(exponents > _LARGEST_EXPONENT, float("nan"))
    first = _power_of_two(torch.tensor(254 - _code_exponent(non_negative), device=codes.device))
    return _floats(bits).mul_(first).mul_(_for_each(scale, codes.numel()))


def encode(
    value: torch.Tensor, noise16: torch.Tensor | int, *, non_negative: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[numel]` to codes and exponents, rounded by the noise; see `decode`."""
    numel, num_blocks = value.numel(), -(-value.numel() // SCALE_BLOCK_NUMEL)
    magnitudes = torch.zeros(num_blocks * SCALE_BLOCK_NUMEL, dtype=torch.int64, device=value.device)
    magnitudes[:numel] = _bits(value) & 0x7FFFFFFF
    exponents = (magnitudes.view(num_blocks, SCALE_BLOCK_NUMEL).amax(1) >> 23).clamp_(min=1)
    first = _power_of_two(254 - exponents.clamp(max=_LARGEST_EXPONENT))
    first.masked_fill_(exponents > _LARGEST_EXPONENT, 0.0)
    second = _power_of_two(torch.tensor(_code_exponent(non_negative), device=value.device))
    scaled = _bits(value.mul(_for_each(first, numel)).mul_(second))
    scaled.masked_fill_(_for_each(exponents > _LARGEST_EXPONENT, numel), 0)  # a NaN's bits depend on the CPU
    dithered = (scaled & 0x7FFFFFFF).add_(noise16 << 4)
    largest = ((256 if non_negative else 128) << _MANTISSA_SHIFT) - 1
    codes = dithered.clamp_(max=largest).bitwise_right_shift_(_MANTISSA_SHIFT)
    codes = torch.maximum(codes, (_bits(value) != 0).long()) if non_negative else codes | (scaled >> 24 & 0x80)
    return codes.to(torch.uint8), exponents.to(torch.uint8)


def _code_exponent(non_negative: bool) -> int:  # noqa: FBT001
    """The exponent field of codes from the scale up to twice the scale."""
    return 31 if non_negative else 15


def _for_each(by_block: torch.Tensor, numel: int) -> torch.Tensor:
    return by_block.repeat_interleave(SCALE_BLOCK_NUMEL)[:numel]


def _power_of_two(biased_exponent: torch.Tensor) -> torch.Tensor:
    return _floats(torch.where(biased_exponent == 0, 0x00400000, biased_exponent << 23))


def _bits(value: torch.Tensor) -> torch.Tensor:
    """fp32 as unsigned 32-bit numbers, in int64."""
    return value.view(torch.int32).to(torch.int64).bitwise_and_(_MASK)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return _as_int(bits, torch.int32).view(torch.float32)


def _as_int(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The lower bits of int64 numbers as a signed integer of fewer."""
    width = dtype.itemsize * 8
    return ((bits & (1 << width) - 1) - ((bits >> width - 1 & 1) << width)).to(dtype)
