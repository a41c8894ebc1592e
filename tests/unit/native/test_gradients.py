"""Square sums and accumulation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

n = pytest.importorskip("zerooffload._native")

POOLS = {num_threads: n.ThreadPool(num_threads) for num_threads in (1, 2, 3, 4)}
DTYPES = {torch.float32: n.Dtype.float32, torch.bfloat16: n.Dtype.bfloat16}
NUMELS = [0, 1, 15, 16, 17, 4095, 4096, 4097, 3 * 4096 + 100, 70 * 4096 + 13]


def square_sums(grad: torch.Tensor, num_threads: int) -> torch.Tensor:
    out = torch.full((math.ceil(grad.numel() / n.BLOCK_NUMEL),), -1.0, dtype=torch.float64)
    n.square_sums(POOLS[num_threads], grad.data_ptr(), DTYPES[grad.dtype], grad.numel(), out.data_ptr())
    return out


def reference_square_sums(grad: torch.Tensor) -> torch.Tensor:
    num_blocks = math.ceil(grad.numel() / n.BLOCK_NUMEL)
    padded = torch.zeros(num_blocks * n.BLOCK_NUMEL, dtype=torch.float64)
    padded[: grad.numel()] = grad
    rows = padded.square_().reshape(num_blocks, n.BLOCK_NUMEL // 16, 16)
    lanes = torch.zeros(num_blocks, 16, dtype=torch.float64)
    for row in rows.unbind(1):
        lanes = lanes + row
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[got.element_size()]
    different = got.view(bits) != expected.view(bits)
    return not bool((different & ~(got.isnan() & expected.isnan())).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("target")
class TestSquareSums:
    @pytest.mark.parametrize("num_threads", POOLS)
    def test_equal_the_reference(self, dtype: torch.dtype, num_threads: int) -> None:
        for numel in NUMELS:
            grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            assert same_bits(square_sums(grad, num_threads), reference_square_sums(grad))

    def test_squares_neither_overflow_nor_vanish(self, dtype: torch.dtype) -> None:
        grad = torch.tensor([3e38, 1e-39]).to(dtype)
        assert square_sums(grad[:1], 1).item() == grad[0].double().item() ** 2
        assert square_sums(grad[1:], 1).item() == grad[1].double().item() ** 2 > 0

    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
    def test_non_finite_values_are_seen_wherever_they_are(self, dtype: torch.dtype, value: float) -> None:
        grad = torch.zeros(2 * 4096 + 21, dtype=dtype)
        for index in (0, 100, 4095, 4096, 8191, 8192, 8212):
            grad[index] = value
            sums = square_sums(grad, 2)
            assert not math.isfinite(sums[index // 4096].item())
            assert sums.isfinite().sum() == 2
            grad[index] = 0

    def test_unaligned_heads(self, dtype: torch.dtype) -> None:
        storage = torch.randn(5000, generator=torch.Generator().manual_seed(2)).to(dtype)
        for head in range(18):
            assert same_bits(square_sums(storage[head:], 1), reference_square_sums(storage[head:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("target")
class TestAccumulate:
    @pytest.mark.parametrize("num_threads", POOLS)
    def test_equals_torch(self, dtype: torch.dtype, num_threads: int) -> None:
        for numel in NUMELS:
            generator = torch.Generator().manual_seed(numel)
            target, source = torch.randn(2, numel, generator=generator).to(dtype)
            expected = target.clone().add_(source)
            n.accumulate(POOLS[num_threads], target.data_ptr(), source.data_ptr(), DTYPES[dtype], numel)
            assert same_bits(target, expected)

    def test_special_values(self, dtype: torch.dtype) -> None:
        values = [0.0, -0.0, 1e-45, 1e-39, -1e-39, 1.2e-38, 1.0, -1.0, 2.0**-8, 3.4e38, -3.4e38]
        values += [float("inf"), float("-inf"), float("nan")]
        pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype)
        target, source = (column.contiguous() for column in pairs.unbind(1))
        expected = target.clone().add_(source)
        n.accumulate(POOLS[1], target.data_ptr(), source.data_ptr(), DTYPES[dtype], target.numel())
        assert same_bits(target, expected)


@settings(deadline=None, max_examples=60)
@given(
    numel=st.integers(0, 3 * 16 * 4096 + 1),
    head=st.integers(0, 33),
    dtype=st.sampled_from(list(DTYPES)),
    num_threads=st.sampled_from(list(POOLS)),
    seed=st.integers(0, 1000),
)
def test_targets_and_threads_agree(numel: int, head: int, dtype: torch.dtype, num_threads: int, seed: int) -> None:
    grad = torch.randn(numel + head, generator=torch.Generator().manual_seed(seed)).to(dtype)[head:]
    expected = reference_square_sums(grad)
    before = n.active_target()
    try:
        for name in n.supported_targets():
            n.set_target(name)
            assert same_bits(square_sums(grad, num_threads), expected)
    finally:
        n.set_target(before)
