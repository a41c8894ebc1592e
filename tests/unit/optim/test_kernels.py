"""The arithmetic: torch's and the native kernels give the same bits, and the norm is the true one."""

from __future__ import annotations

import math

import pytest
import torch

from zerooffload import ConfigError, native
from zerooffload.optim.kernels import Kernels, NativeKernels, TorchKernels, host_kernels
from zerooffload.optim.record import EXP_AVG, EXP_AVG_SQ, REMAINDER, optimizer_parts
from zerooffload.optim.reference import BLOCK_NUMEL, join_master, split_master
from zerooffload.optim.scalars import AdamWSettings

needs_native = pytest.mark.skipif(not native.available, reason=f"no native module: {native.why_unavailable}")
LENGTHS = [1, 17, BLOCK_NUMEL, 3 * BLOCK_NUMEL + 5]
FLOATS = [torch.float32, torch.bfloat16]


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 3).to(dtype)


def train(kernels: Kernels, numel: int, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> list[torch.Tensor]:
    """Three steps from the same start: the parameter and its record."""
    param, remainder = random(numel, 0), None
    record = {EXP_AVG.name: torch.zeros(numel), EXP_AVG_SQ.name: torch.zeros(numel)}
    if param_dtype is torch.bfloat16:
        param, remainder = split_master(param)
        record[REMAINDER.name] = remainder
    for step in (1, 2, 3):
        settings = AdamWSettings(
            lr=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            maximize=step == 2,
            grad_factor=0.3,
            step=step,
        )
        kernels.adamw(param, record, random(numel, step, grad_dtype), settings.scalars())
    return [param, *record.values()]


@needs_native
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("param_dtype", FLOATS)
@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_and_torch_kernels_update_to_the_same_bits(
    numel: int, param_dtype: torch.dtype, grad_dtype: torch.dtype, num_threads: int
) -> None:
    expected = train(TorchKernels(), numel, param_dtype, grad_dtype)
    got = train(NativeKernels(num_threads), numel, param_dtype, grad_dtype)
    for one, other in zip(expected, got, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@needs_native
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_native_and_torch_kernels_sum_and_accumulate_to_the_same_bits(numel: int, dtype: torch.dtype) -> None:
    both: list[Kernels] = [TorchKernels(), NativeKernels(2)]
    grad = random(numel, 1, dtype)
    first, second = (kernels.square_sums(grad) for kernels in both)
    assert torch.equal(first, second)
    totals = [random(numel, 2, dtype) for _ in both]
    for kernels, total in zip(both, totals, strict=True):
        kernels.accumulate(total, grad)
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], random(numel, 2, dtype) + grad)


def test_an_fp32_step_is_adamw_in_double_within_rounding() -> None:
    param, exp_avg, exp_avg_sq = train(TorchKernels(), 1000, torch.float32, torch.float32)
    p, m, v = random(1000, 0).double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for step in (1, 2, 3):
        g = random(1000, step).double() * (-0.3 if step == 2 else 0.3)
        p *= 1 - 0.01 * 0.1
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        p -= 0.01 / (1 - 0.9**step) * m / (v.sqrt() / math.sqrt(1 - 0.95**step) + 1e-8)
    torch.testing.assert_close(param.double(), p, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq.double(), v, rtol=1e-5, atol=1e-7)


def test_bf16_parameters_and_remainders_are_the_fp32_master_bit_for_bit() -> None:
    (fp32, *moments) = train(TorchKernels(), 5000, torch.float32, torch.bfloat16)
    param, *bf16_moments, remainder = train(TorchKernels(), 5000, torch.bfloat16, torch.bfloat16)
    assert torch.equal(join_master(param, remainder), fp32)
    assert all(torch.equal(one, other) for one, other in zip(moments, bf16_moments, strict=True))


@pytest.mark.parametrize("numel", LENGTHS)
def test_the_norm_from_block_sums_is_the_norm(numel: int) -> None:
    grad = random(numel, 7)
    sums = TorchKernels().square_sums(grad)
    assert sums.dtype is torch.float64
    assert sums.shape == (-(-numel // BLOCK_NUMEL),)
    exact = math.sqrt(math.fsum(value * value for value in grad.double().tolist()))
    assert math.sqrt(math.fsum(sums.tolist())) == pytest.approx(exact, rel=1e-14)


def test_without_the_native_module_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    assert host_kernels().name == "torch"


@needs_native
def test_the_kernels_name_tells_target_and_threads() -> None:
    assert host_kernels(2).name == f"native ({native.module.active_target()}, 2 threads)"


@pytest.mark.parametrize(
    ("dtype", "names"),
    [(torch.float32, ["exp_avg", "exp_avg_sq"]), (torch.bfloat16, ["remainder", "exp_avg", "exp_avg_sq"])],
)
def test_the_record_is_what_is_missing_to_a_master_and_the_moments(dtype: torch.dtype, names: list[str]) -> None:
    assert [part.name for part in optimizer_parts(dtype)] == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_a_dtype_that_cannot_be_trained_is_refused_with_those_that_can(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"{dtype}.*float32, bfloat16"):
        optimizer_parts(dtype)
