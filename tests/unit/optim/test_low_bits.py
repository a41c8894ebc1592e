"""Moments in fewer bits: what a code means, that reading it back is exact, and that rounding is right on average."""

from __future__ import annotations

import math

import pytest
import torch

from zerooffload.optim import low_bits
from zerooffload.optim.low_bits import NEAREST, SCALE_BLOCK_NUMEL, decode, encode, noise, to_bf16

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("non_negative", [False, True], ids=["any sign", "non-negative"])
ALL_NOISE = torch.arange(1 << 16)
NUM_VALUES = 127 * 200


def meaning(code: int, exponent: int, *, non_negative: bool) -> float:
    """In double, which holds every one exactly, from the documented format."""
    top = 31 if non_negative else 15
    magnitude = code if non_negative else code & 0x7F
    field, eighths = magnitude >> 3, magnitude & 7
    ratio = math.ldexp(eighths, 1 - top - 3) if field == 0 else math.ldexp(8 + eighths, field - top - 3)
    sign = -1.0 if code & 0x80 and not non_negative else 1.0
    return sign * math.ldexp(ratio, exponent - 127)


def least_normal(*, non_negative: bool) -> float:
    """Of the scale; below it codes are denormal."""
    return 2.0**-30 if non_negative else 2.0**-14


def full_scale_blocks(values: torch.Tensor) -> torch.Tensor:
    """Values below 2 in magnitude, `[127 k]`, in blocks that begin with a 1, so that the scale is 1."""
    blocks = torch.ones(values.numel() // (SCALE_BLOCK_NUMEL - 1), SCALE_BLOCK_NUMEL)
    blocks[:, 1:] = values.view(-1, SCALE_BLOCK_NUMEL - 1)
    return blocks.view(-1)


@KINDS
@pytest.mark.parametrize("exponent", [0, 1, 2, 60, 127, 200, 253, 254])
def test_a_code_means_what_the_format_says(*, non_negative: bool, exponent: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = decode(codes, torch.full((2,), exponent, dtype=torch.uint8), non_negative=non_negative)
    exact = torch.tensor(
        [meaning(code, exponent, non_negative=non_negative) for code in range(256)], dtype=torch.float64
    )
    # Rounded once, where the result is a denormal float.
    assert torch.equal(got, exact.float())
    assert got.isfinite().all()


@KINDS
@pytest.mark.parametrize("exponent", [60, 127, 200, 253, 254])
@pytest.mark.parametrize("noise16", [0, NEAREST, 0xFFFF])
def test_every_code_survives_a_round_trip(*, non_negative: bool, exponent: int, noise16: int) -> None:
    """Two blocks that have all codes, each with one that fixes the scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    if non_negative:
        codes[0, 1] = 255  # else the first block would have a smaller scale
    codes = codes.reshape(-1)
    exponents = torch.full((2,), exponent, dtype=torch.uint8)
    again, scales = encode(decode(codes, exponents, non_negative=non_negative), noise16, non_negative=non_negative)
    assert torch.equal(scales, exponents)
    assert torch.equal(again, codes)


def test_every_bf16_survives_a_round_trip() -> None:
    bits = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    finite = bits[~bits.isnan()]
    for noise16 in (0, NEAREST, 0xFFFF):
        assert torch.equal(to_bf16(finite.float(), noise16).view(torch.int16), finite.view(torch.int16))
    nans = to_bf16(bits[bits.isnan()].float(), NEAREST)
    assert (nans.view(torch.int16) == 0x7FC0).all()


@KINDS
def test_one_rounding_to_8_bits_is_off_by_less_than_an_eighth(*, non_negative: bool) -> None:
    """Three bits of mantissa: neighbours of x are at most 2^-3 |x| apart, and rounding goes to one of them.

    Below the denormal range they are 2^-3 of the least normal number apart. At the end of the range, above 1.875 of the
    scale, numbers are cut: from 2 by less than 2^-4 of them.
    """
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-20 if not non_negative else -36, 1, (NUM_VALUES,), generator=generator)
    values = torch.ldexp(torch.rand(NUM_VALUES, generator=generator) + 1, exponents)
    if not non_negative:
        values *= torch.where(torch.rand(NUM_VALUES, generator=generator) < 0.5, -1.0, 1.0)
    blocks = full_scale_blocks(values)
    for seed in range(8):
        dither = noise(0, blocks.numel(), seed, 1, CPU)
        codes, scales = encode(blocks, dither, non_negative=non_negative)
        assert (scales == 127).all()
        error = (decode(codes, scales, non_negative=non_negative) - blocks).abs()
        assert (error < blocks.abs().clamp(min=least_normal(non_negative=non_negative)) * 2.0**-3).all()


def test_one_rounding_to_bf16_is_off_by_less_than_a_128th() -> None:
    """Seven bits of mantissa: neighbours of x are at most 2^-7 |x| apart, and rounding goes to one of them."""
    values = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(2))
    for seed in range(8):
        error = to_bf16(values, noise(0, values.numel(), seed, 0, CPU)).float() - values
        assert (error.abs() < values.abs() * 2.0**-7).all()


def test_bf16_over_all_noise_is_exact_on_average() -> None:
    """16 bits are cut off, and there are 2^16 kinds of noise: as many of them round up as it takes."""
    for value in (1.0 + 2.0**-20, -3.14159265, 1e-30, 2.0**-140, 0.0):
        rounded = to_bf16(torch.full((1 << 16,), value), ALL_NOISE).double()
        assert float(rounded.sum()) / (1 << 16) == float(torch.tensor(value))


@KINDS
def test_8_bits_over_all_noise_are_right_on_average_to_2_16th_of_a_step(*, non_negative: bool) -> None:
    """20 bits are cut off and the noise has the upper 16 of them: what is lost is below 2^-16 of a step, downwards."""
    num_blocks = 1 << 9  # of 128 elements: 2^16 of them
    for value in (1.0 / 3, 0.7, 1.0 + 2.0**-20, 3e-4, 1.8749):
        # Twice, so that each kind of noise meets the value although each block's first element fixes the scale.
        mean = 0.0
        for fixed in (0, 1):
            values = torch.full((num_blocks, SCALE_BLOCK_NUMEL), value)
            values[:, fixed] = 1.0
            codes, scales = encode(values.view(-1), ALL_NOISE, non_negative=non_negative)
            assert (scales == 127).all()
            rounded = decode(codes, scales, non_negative=non_negative).view_as(values).double()
            mean += float(rounded[:, 1:].sum() if fixed == 0 else rounded[:, 0].sum()) / (1 << 16)
        step = 2.0 ** (math.floor(math.log2(value)) - 3)
        assert 0 <= float(torch.tensor(value)) - mean < step * 2.0**-16


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("kind", ["bf16", "any sign", "non-negative"])
def test_the_mean_over_many_seeds_is_the_value(moment: int, kind: str) -> None:
    """Within 5 standard errors, as if seeds were independent.

    A value that lies the fraction f of a step s above a code goes up with probability f and down with 1 - f: its error
    has mean 0 and variance f (1 - f) s^2, so the mean over n seeds has the standard error s sqrt(f (1 - f) / n). With
    8-bit codes the mean may be 2^-16 s too low as well (see above).
    """
    num_seeds, numel = 1024, 128
    seeds = torch.randint(0, 1 << 32, (num_seeds,), generator=torch.Generator().manual_seed(3)).tolist()
    values = torch.rand(numel, generator=torch.Generator().manual_seed(4)) * 0.8 + 1.0  # one step size for all
    values[0] = 1.0  # fixes the scale; exact
    total = torch.zeros(numel, dtype=torch.float64)
    for seed in seeds:
        dither = noise(1000, numel, seed, moment, CPU)
        if kind == "bf16":
            total += to_bf16(values, dither)
        else:
            codes, scales = encode(values, dither, non_negative=kind == "non-negative")
            total += decode(codes, scales, non_negative=kind == "non-negative")
    step = 2.0**-7 if kind == "bf16" else 2.0**-3
    fraction = torch.remainder(values.double(), step) / step
    standard_error = step * (fraction * (1 - fraction) / num_seeds).sqrt()
    difference = (total / num_seeds - values.double()).abs()
    assert (difference <= 5 * standard_error + step * 2.0**-16).all()


def test_noise_of_neighbours_steps_and_moments_is_uniform_and_unrelated() -> None:
    """The mean of n uniform numbers in [0, 1) has the standard error sqrt(1 / 12 n); a product of two that are
    unrelated, less 1 / 4, sqrt(7 / 144 n).
    """
    numel = 1 << 16
    base, later = noise(0, numel, 1, 0, CPU) / 65536, noise(0, numel, 0x9E3779B9, 0, CPU) / 65536
    second = noise(0, numel, 1, 1, CPU) / 65536
    for one in (base, later, second):
        assert abs(float(one.double().mean()) - 0.5) < 5 * math.sqrt(1 / 12 / numel) + 2.0**-17
    for one, other in ((base, later), (base, second), (base, base.roll(1)), (base, base.roll(128))):
        product = float((one.double() * other.double()).mean())
        assert abs(product - 0.25) < 5 * math.sqrt(7 / 144 / numel) + 2.0**-17


def test_noise_goes_by_the_index_modulo_2_32() -> None:
    whole = noise(0, 1000, 7, 0, CPU)
    assert torch.equal(noise(300, 700, 7, 0, CPU), whole[300:])
    assert torch.equal(noise(1 << 32, 1000, 7, 0, CPU), whole)
    assert int(whole.min()) >= 0
    assert int(whole.max()) <= 0xFFFF


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    """From the smallest denormal beside the largest number, 2^-277 of it, and with no noise at all."""
    values = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    values = torch.cat([values, torch.zeros(3), torch.tensor([1e-45, 1e-20])])
    for dither in (0, NEAREST):
        codes, scales = encode(values, dither, non_negative=True)
        assert torch.equal(codes == 0, values == 0)
        read = decode(codes, scales, non_negative=True)
        first_block = slice(0, SCALE_BLOCK_NUMEL)
        assert (read[SCALE_BLOCK_NUMEL:] > 0).equal(values[SCALE_BLOCK_NUMEL:] > 0)
        # The first block's scale is 2^-22: its smallest code still is a float.
        assert (read[first_block] > 0).all()


@KINDS
def test_blocks_of_zeros_stay_zero_and_those_with_what_is_not_finite_are_nan(*, non_negative: bool) -> None:
    values = torch.zeros(4 * SCALE_BLOCK_NUMEL)
    values[SCALE_BLOCK_NUMEL : 2 * SCALE_BLOCK_NUMEL] = 1.0
    values[SCALE_BLOCK_NUMEL] = float("nan")
    values[2 * SCALE_BLOCK_NUMEL] = float("inf")
    values[3 * SCALE_BLOCK_NUMEL] = torch.finfo(torch.float32).max
    codes, scales = encode(values, 0xFFFF, non_negative=non_negative)
    assert scales.tolist() == [1, 255, 255, 254]
    blocks = decode(codes, scales, non_negative=non_negative).view(4, SCALE_BLOCK_NUMEL)
    assert not blocks[0].any()
    assert blocks[1:3].isnan().all()
    assert blocks[3].isfinite().all()
    assert float(blocks[3, 0]) == 1.875 * 2.0**127


def test_a_new_record_of_zeros_reads_as_zero() -> None:
    zeros = torch.zeros(SCALE_BLOCK_NUMEL, dtype=torch.uint8)
    for non_negative in (False, True):
        assert not decode(zeros, zeros[:1], non_negative=non_negative).any()


def test_lengths_that_are_no_multiple_of_a_block() -> None:
    for numel in (0, 1, 127, 129, 300):
        values = torch.rand(numel, generator=torch.Generator().manual_seed(numel))
        codes, scales = encode(values, NEAREST, non_negative=True)
        assert codes.shape == (numel,)
        assert scales.shape == (-(-numel // SCALE_BLOCK_NUMEL),)
        torch.testing.assert_close(decode(codes, scales, non_negative=True), values, rtol=2.0**-4, atol=0)


def test_the_native_module_agrees_about_the_block() -> None:
    native = pytest.importorskip("zerooffload._native")
    assert native.SCALE_BLOCK_NUMEL == low_bits.SCALE_BLOCK_NUMEL
