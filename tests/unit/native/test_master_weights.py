"""float32 masters as bfloat16 and 16-bit remainder."""

from __future__ import annotations

import pytest
import torch

n = pytest.importorskip("zerooffload._native")

CANONICAL_NAN = 0x7FC00000


def split(bits: torch.Tensor, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [numel] of float32 bits -> (bfloat16, int16)."""
    param = torch.empty(bits.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(bits.numel(), dtype=torch.int16)
    pool = n.ThreadPool(num_threads)
    n.split_fp32(pool, bits.data_ptr(), param.data_ptr(), remainder.data_ptr(), bits.numel())
    return param, remainder


def join(param: torch.Tensor, remainder: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
    bits = torch.empty(param.numel(), dtype=torch.int32)
    pool = n.ThreadPool(num_threads)
    n.join_fp32(pool, param.data_ptr(), remainder.data_ptr(), bits.data_ptr(), param.numel())
    return bits


def reference_split(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In int64, where nothing wraps."""
    wide = torch.where(bits.view(torch.float32).isnan(), CANONICAL_NAN, bits.long() & 0xFFFFFFFF)
    high = (wide + 0x8000) >> 16
    return high.to(torch.uint16).view(torch.bfloat16), (wide - (high << 16)).to(torch.int16)


@pytest.mark.usefixtures("target")
class TestSplit:
    def test_all_values_near_each_rounding_boundary(self) -> None:
        """For each upper half: the lower halves around zero, the tie and the top."""
        low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
        bits = ((torch.arange(1 << 16) << 16)[:, None] + low).reshape(-1).to(torch.uint32).view(torch.int32)
        param, remainder = split(bits, num_threads=2)
        expected_param, expected_remainder = reference_split(bits)
        assert torch.equal(param.view(torch.int16), expected_param.view(torch.int16))
        assert torch.equal(remainder, expected_remainder)
        nan = bits.view(torch.float32).isnan()
        assert torch.equal(join(param, remainder, num_threads=2), bits.masked_fill(nan, CANONICAL_NAN))

    def test_all_lower_halves_of_one_value(self) -> None:
        bits = 0x3F800000 + torch.arange(1 << 16, dtype=torch.int32)
        param, remainder = split(bits)
        assert torch.equal(join(param, remainder), bits)
        # The parameter is the nearest bfloat16.
        error = (param.float() - bits.view(torch.float32)).abs()
        assert error.max().item() <= 2.0**-8

    def test_odd_lengths(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for numel in [0, 1, 3, 17, 4097, 33 * 4096 + 1]:
            bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int32)
            bits.masked_fill_(bits.view(torch.float32).isnan(), 1)
            assert torch.equal(join(*split(bits, 3), num_threads=2), bits)
