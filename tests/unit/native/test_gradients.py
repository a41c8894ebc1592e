"""Square sums, and gradients that arrive."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

n = pytest.importorskip("zerooffload._native")

POOLS = {num_threads: n.ThreadPool(num_threads) for num_threads in (1, 2, 3, 4)}
DTYPES = {torch.float32: n.Dtype.float32, torch.bfloat16: n.Dtype.bfloat16, torch.float16: n.Dtype.float16}
NUMELS = [0, 1, 15, 16, 17, 4095, 4096, 4097, 3 * 4096 + 100, 70 * 4096 + 13]
PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
PAIRS += [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
"""Target and source."""
SPECIAL = [0.0, -0.0, 1e-45, 1e-39, -1e-39, 1.2e-38, 6e-8, 6.1e-5, 1.0, -1.0, 2.0**-8, 65504.0, 3.4e38, -3.4e38]
SPECIAL += [float("inf"), float("-inf"), float("nan")]


def empty_sums(numel: int) -> torch.Tensor:
    return torch.full((math.ceil(numel / n.BLOCK_NUMEL),), -1.0, dtype=torch.float64)


def square_sums(grad: torch.Tensor, num_threads: int) -> torch.Tensor:
    out = empty_sums(grad.numel())
    n.square_sums(POOLS[num_threads], grad.data_ptr(), DTYPES[grad.dtype], grad.numel(), out.data_ptr())
    return out


def arrive(arrival, target: torch.Tensor, source: torch.Tensor, num_threads: int) -> torch.Tensor:
    sums = empty_sums(target.numel())
    n.arrive(
        POOLS[num_threads],
        arrival,
        target.data_ptr(),
        DTYPES[target.dtype],
        source.data_ptr(),
        DTYPES[source.dtype],
        target.numel(),
        sums.data_ptr(),
    )
    return sums


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


def reference_arrival(arrival, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """In fp32, which holds every sum of two that a 16-bit dtype has, up to one rounding, then in the target's dtype."""
    if arrival is n.Arrival.replace:
        return source.to(target.dtype)
    return (target.float() + source.float()).to(target.dtype)


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
        finite = torch.finfo(dtype)
        grad = torch.tensor([finite.max, finite.smallest_normal / 4], dtype=dtype)
        assert square_sums(grad[:1], 1).item() == grad[0].double().item() ** 2
        assert square_sums(grad[1:].clone(), 1).item() == grad[1].double().item() ** 2 > 0

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


@pytest.mark.parametrize("arrival", [n.Arrival.add, n.Arrival.replace])
@pytest.mark.parametrize(("target_dtype", "source_dtype"), PAIRS)
@pytest.mark.usefixtures("target")
class TestArrive:
    @pytest.mark.parametrize("num_threads", POOLS)
    def test_equals_torch(
        self, arrival, target_dtype: torch.dtype, source_dtype: torch.dtype, num_threads: int
    ) -> None:
        for numel in NUMELS:
            values = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
            target, source = values[0].to(target_dtype), values[1].to(source_dtype)
            expected = reference_arrival(arrival, target, source)
            before = source.clone()
            sums = arrive(arrival, target, source, num_threads)
            assert same_bits(target, expected)
            assert same_bits(sums, reference_square_sums(expected))
            assert torch.equal(source, before)

    def test_special_values(self, arrival, target_dtype: torch.dtype, source_dtype: torch.dtype) -> None:
        pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).T.contiguous()
        target, source = pairs[0].to(target_dtype), pairs[1].to(source_dtype)
        expected = reference_arrival(arrival, target, source)
        arrive(arrival, target, source, 1)
        assert same_bits(target, expected)


def test_types_that_do_not_go_together_are_refused() -> None:
    target = torch.zeros(4, dtype=torch.float16)
    with pytest.raises(ValueError, match="source: expected the target's type, or a float32 target"):
        arrive(n.Arrival.add, target, torch.zeros(4), 1)


@settings(deadline=None, max_examples=60)
@given(
    numel=st.integers(0, 3 * 16 * 4096 + 1),
    head=st.integers(0, 33),
    pair=st.sampled_from(PAIRS),
    arrival=st.sampled_from([n.Arrival.add, n.Arrival.replace]),
    num_threads=st.sampled_from(list(POOLS)),
)
def test_targets_and_threads_agree(
    numel: int, head: int, pair: tuple[torch.dtype, torch.dtype], arrival, num_threads: int
) -> None:
    values = torch.randn(2, numel + head, generator=torch.Generator().manual_seed(numel + head))
    start, source = values[0].to(pair[0])[head:], values[1].to(pair[1])[head:]
    expected = reference_arrival(arrival, start, source)
    sums = reference_square_sums(expected)
    before = n.active_target()
    try:
        for name in n.supported_targets():
            n.set_target(name)
            target = values[0].to(pair[0])[head:].clone()
            assert same_bits(arrive(arrival, target, source, num_threads), sums)
            assert same_bits(target, expected)
            assert same_bits(square_sums(target, num_threads), sums)
    finally:
        n.set_target(before)
