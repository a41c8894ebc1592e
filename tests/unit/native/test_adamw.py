"""The AdamW kernels equal their torch reference bit for bit: every target, any number of threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

n = pytest.importorskip("zerooffload._native")

POOLS = {num_threads: n.ThreadPool(num_threads) for num_threads in (1, 2, 3, 4)}
DTYPES = {torch.float32: n.Dtype.float32, torch.bfloat16: n.Dtype.bfloat16}
NUMELS = [0, 1, 5, 31, 513, 4095, 4096, 4097, 70 * 4096 + 13]
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.17549435e-38, 1e-20, 1.0, -1.0, 3.4e38, -3.4e38]
SPECIAL += [float("inf"), float("-inf"), float("nan")]


def scalars(step: int = 3, grad_factor: float = 0.7, weight_decay: float = 0.1):
    lr, beta1, beta2, eps = 1e-2, 0.9, 0.999, 1e-8
    return n.AdamWScalars(
        grad_factor=grad_factor,
        decay=1 - lr * weight_decay,
        beta1=beta1,
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        bias2_sqrt=(1 - beta2**step) ** 0.5,
        eps=eps,
        step_size=lr / (1 - beta1**step),
    )


@dataclasses.dataclass
class State:
    param: torch.Tensor  # float32 [numel]
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor

    def copy(self) -> State:
        return State(*(getattr(self, field.name).clone() for field in dataclasses.fields(self)))


def random_state(numel: int, grad_dtype: torch.dtype, seed: int = 0, head: int = 0) -> State:
    """Views that start `head` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(numel + head, generator=generator).mul_(scale)

    state = State(normal(1.0), normal(0.1), normal(0.1).square_(), normal(1.0).to(grad_dtype))
    return State(*(getattr(state, field.name)[head:] for field in dataclasses.fields(state)))


def special_state(grad_dtype: torch.dtype) -> State:
    """Every combination of special values in parameter, first moment, second moment and gradient."""
    values = torch.tensor(SPECIAL)
    squares = values[~(values < 0)]  # a second moment is not negative
    param, exp_avg, exp_avg_sq, grad = torch.cartesian_prod(values, values, squares, values).unbind(1)
    return State(param.contiguous(), exp_avg.contiguous(), exp_avg_sq.contiguous(), grad.contiguous().to(grad_dtype))


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square root, rounded once, as torch's own is not with MKL on an AMD CPU (one in five is off).

    A float64 root, even if off by one unit in the last place, lies on the right side of the nearest tie of
    float32: the root of a float32 is at least 2**-51 away from any, relatively.
    """
    return values.double().sqrt().float()


def reference(state: State, k) -> None:
    """Each torch operation rounds once."""
    grad = state.grad.float() * k.grad_factor
    state.param.mul_(k.decay)
    state.exp_avg.mul_(k.beta1).add_(grad * k.one_minus_beta1)
    state.exp_avg_sq.mul_(k.beta2).add_((grad * grad) * k.one_minus_beta2)
    denominator = (rounded_sqrt(state.exp_avg_sq) / k.bias2_sqrt) + k.eps
    state.param.sub_((state.exp_avg / denominator) * k.step_size)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaNs count as equal: the payload of one that is made from two others is not promised."""
    assert got.dtype == expected.dtype == torch.float32
    different = got.view(torch.int32) != expected.view(torch.int32)
    return not bool((different & ~(got.isnan() & expected.isnan())).any())


def assert_same(got: State, expected: State) -> None:
    assert same_bits(got.param, expected.param)
    assert same_bits(got.exp_avg, expected.exp_avg)
    assert same_bits(got.exp_avg_sq, expected.exp_avg_sq)


def step_fp32(state: State, k, num_threads: int) -> None:
    n.adamw_fp32(
        POOLS[num_threads],
        state.param.data_ptr(),
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        state.grad.data_ptr(),
        DTYPES[state.grad.dtype],
        state.param.numel(),
        k,
    )


def step_bf16(state: State, k, num_threads: int) -> None:
    """Split the parameter, step, join: the state is that of a float32 master before and after."""
    pool, numel = POOLS[num_threads], state.param.numel()
    param = torch.empty(numel, dtype=torch.bfloat16)
    remainder = torch.empty(numel, dtype=torch.int16)
    n.split_fp32(pool, state.param.data_ptr(), param.data_ptr(), remainder.data_ptr(), numel)
    n.adamw_bf16(
        pool,
        param.data_ptr(),
        remainder.data_ptr(),
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        state.grad.data_ptr(),
        DTYPES[state.grad.dtype],
        numel,
        k,
    )
    n.join_fp32(pool, param.data_ptr(), remainder.data_ptr(), state.param.data_ptr(), numel)


@pytest.mark.parametrize("step", [step_fp32, step_bf16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.usefixtures("target")
class TestEqualsReference:
    @pytest.mark.parametrize("num_threads", POOLS)
    def test_random_values_over_three_steps(self, step, grad_dtype: torch.dtype, num_threads: int) -> None:
        for numel in NUMELS:
            got = random_state(numel, grad_dtype)
            expected = got.copy()
            for index in range(1, 4):
                step(got, scalars(index), num_threads)
                reference(expected, scalars(index))
            assert_same(got, expected)

    def test_unaligned_heads(self, step, grad_dtype: torch.dtype) -> None:
        for head in range(18):
            got = random_state(1000 + head, grad_dtype, head=head)
            expected = got.copy()
            step(got, scalars(), 1)
            reference(expected, scalars())
            assert_same(got, expected)

    def test_special_values(self, step, grad_dtype: torch.dtype) -> None:
        got = special_state(grad_dtype)
        expected = got.copy()
        step(got, scalars(), 2)
        reference(expected, scalars())
        assert_same(got, expected)

    @pytest.mark.parametrize("grad_factor", [0.0, 1e-38, float("inf"), float("nan")])
    def test_special_factors(self, step, grad_dtype: torch.dtype, grad_factor: float) -> None:
        got = random_state(300, grad_dtype)
        expected = got.copy()
        step(got, scalars(grad_factor=grad_factor), 1)
        reference(expected, scalars(grad_factor=grad_factor))
        assert_same(got, expected)

    def test_denormals_are_kept_whatever_the_thread_says(self, step, grad_dtype: torch.dtype) -> None:
        got = random_state(70 * 4096, grad_dtype)
        for tensor in (got.param, got.exp_avg, got.grad):
            tensor.mul_(1e-38)
        got.exp_avg_sq.mul_(1e-38)
        expected = got.copy()
        reference(expected, scalars())
        assert torch.set_flush_denormal(True)
        try:
            step(got, scalars(), 2)
            still_flushes = (torch.tensor([1e-38]) * 0.1).item() == 0
        finally:
            torch.set_flush_denormal(False)
        assert still_flushes  # the caller's own mode came back
        assert_same(got, expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_cut_gives_the_same_bits(data: st.DataObject) -> None:
    """A span may be stepped whole or in parts, by any number of threads and targets."""
    numel = data.draw(st.integers(1, 3 * 16 * 4096 + 1), label="numel")
    head = data.draw(st.integers(0, 33), label="head")
    grad_dtype = data.draw(st.sampled_from(list(DTYPES)), label="grad_dtype")
    step = data.draw(st.sampled_from([step_fp32, step_bf16]), label="step")
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4), label="cuts"))
    before = n.active_target()
    whole = random_state(numel, grad_dtype, head=head)
    parts = whole.copy()
    try:
        n.set_target("baseline")
        step(whole, scalars(), 1)
        n.set_target(data.draw(st.sampled_from(n.supported_targets()), label="target"))
        for begin, end in zip([0, *cuts], [*cuts, numel], strict=True):
            part = State(*(getattr(parts, field.name)[begin:end] for field in dataclasses.fields(parts)))
            step(part, scalars(), data.draw(st.sampled_from(list(POOLS)), label="num_threads"))
    finally:
        n.set_target(before)
    assert_same(parts, whole)


def test_scalars_are_rounded_once_to_float32() -> None:
    assert scalars().beta1 == torch.tensor(0.9).item()
    assert scalars().eps == torch.tensor(1e-8).item()


def test_scalars_are_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        n.AdamWScalars(*[1.0] * 9)
    with pytest.raises(AttributeError):
        scalars().eps = 1.0


def test_bad_addresses_are_refused() -> None:
    state = random_state(8, torch.float32)
    good = state.param.data_ptr()
    with pytest.raises(ValueError, match="exp_avg: expected an address on a multiple of 4 bytes, got 0"):
        n.adamw_fp32(POOLS[1], good, 0, good, good, n.Dtype.float32, 8, scalars())
    with pytest.raises(ValueError, match="remainder: expected an address on a multiple of 2 bytes"):
        n.adamw_bf16(POOLS[1], good, good + 1, good, good, good, n.Dtype.float32, 8, scalars())
    with pytest.raises(ValueError, match="numel: expected 0 or more, got -1"):
        n.adamw_fp32(POOLS[1], good, good, good, good, n.Dtype.float32, -1, scalars())
