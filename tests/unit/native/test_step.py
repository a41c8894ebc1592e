"""Native steps equal `zerooffload.optim.reference.step` bit for bit: every rule, format and target."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

n = pytest.importorskip("zerooffload._native")

from support.optimizer_arrays import DTYPES, MOMENTS, Arrays, difference, make_arrays, scalars_of  # noqa: E402

from zerooffload.optim import reference  # noqa: E402
from zerooffload.optim.kernels import NativeKernels  # noqa: E402
from zerooffload.optim.record import OptimizerStates  # noqa: E402
from zerooffload.optim.rules import RULES, StepScalars  # noqa: E402

KERNELS = {num_threads: NativeKernels(num_threads) for num_threads in (1, 2, 3, 4)}
FEW_THREADS_BEGIN = 32 * n.BLOCK_NUMEL
"""From here on a step uses more than one thread."""


def native_step(arrays: Arrays, scalars: StepScalars, first_index: int = 0, num_threads: int = 1) -> None:
    KERNELS[num_threads].step(scalars, arrays.param, arrays.record, arrays.grad, first_index)


def reference_step(arrays: Arrays, scalars: StepScalars, first_index: int = 0) -> None:
    reference.step(scalars, arrays.param, arrays.record, arrays.grad, first_index)


@pytest.mark.parametrize("algorithm", RULES)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.usefixtures("target")
class TestEqualsReference:
    def test_over_three_steps_in_all_dtypes(self, algorithm: str, moments) -> None:
        for param_dtype in DTYPES:
            for grad_dtype in DTYPES:
                got = make_arrays(OptimizerStates(algorithm, moments), (param_dtype, grad_dtype), 2500, head=3)
                expected = got.copy()
                for step in (1, 2, 3):
                    native_step(got, scalars_of(algorithm, step), 512)
                    reference_step(expected, scalars_of(algorithm, step), 512)
                assert difference(got, expected) == "", (param_dtype, grad_dtype)

    @pytest.mark.parametrize("grad_factor", [0.0, 1e-38, float("inf"), float("nan")])
    def test_special_factors(self, algorithm: str, moments, grad_factor: float) -> None:
        got = make_arrays(OptimizerStates(algorithm, moments), (torch.bfloat16, torch.float16), 1000)
        expected = got.copy()
        scalars = scalars_of(algorithm, grad_factor=grad_factor)
        native_step(got, scalars)
        reference_step(expected, scalars)
        assert difference(got, expected) == ""


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.usefixtures("target")
def test_denormals_are_kept_whatever_the_thread_says(moments) -> None:
    dtypes = (torch.float32, torch.float32)
    got = make_arrays(OptimizerStates("adamw", moments), dtypes, FEW_THREADS_BEGIN, seed=1)
    for value in (got.param, got.grad):
        value.mul_(1e-38)
    expected = got.copy()
    reference_step(expected, scalars_of("adamw"))
    assert torch.set_flush_denormal(True)
    try:
        native_step(got, scalars_of("adamw"), num_threads=2)
        still_flushes = (torch.tensor([1e-38]) * 0.1).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_flushes  # the caller's own mode came back
    assert difference(got, expected) == ""


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_cut_thread_and_target_gives_the_bits_of_the_reference(data: st.DataObject) -> None:
    moments = data.draw(st.sampled_from(MOMENTS), label="moments")
    states = OptimizerStates(data.draw(st.sampled_from(list(RULES)), label="algorithm"), moments)
    dtypes = data.draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)), label="dtypes")
    numel = data.draw(st.integers(0, 1200) | st.integers(0, 2 * FEW_THREADS_BEGIN), label="numel")
    head = data.draw(st.integers(0, 33), label="head")
    seed = data.draw(st.integers(0, 1000), label="seed")
    # Cuts fall on multiples of 128 where elements share a scale.
    unit = states.block_numel
    cuts = [unit * cut for cut in data.draw(st.lists(st.integers(0, numel // unit), max_size=4), label="cuts")]
    first_index = unit * data.draw(st.integers(0, 2**33 // unit), label="first_index")
    scalars = scalars_of(states.algorithm, data.draw(st.integers(1, 10**7), label="step"))

    got = make_arrays(states, dtypes, numel, seed=seed, head=head)
    expected = got.copy()
    reference_step(expected, scalars, first_index)
    before = n.active_target()
    try:
        n.set_target(data.draw(st.sampled_from(n.supported_targets()), label="target"))
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), numel], strict=True):
            num_threads = data.draw(st.sampled_from(list(KERNELS)), label="num_threads")
            native_step(got.part(start, stop), scalars, first_index + start, num_threads)
    finally:
        n.set_target(before)
    assert difference(got, expected) == ""


def test_wrong_numbers_of_moments_and_scalars_are_refused() -> None:
    pool, fp32 = n.ThreadPool(1), n.Dtype.float32
    plain = n.MomentFormat.float32
    with pytest.raises(ValueError, match="moments: expected 2, got 1"):
        n.step(pool, n.Rule.adamw, 0, fp32, 0, 0, fp32, plain, [(0, 0)], 0, [1.0] * 9, 0, 0)
    with pytest.raises(ValueError, match="scalars: expected 5, got 9"):
        n.step(pool, n.Rule.adagrad, 0, fp32, 0, 0, fp32, plain, [(0, 0)], 0, [1.0] * 9, 0, 0)


def test_bad_addresses_are_refused_by_name() -> None:
    pool, rule, fp32, bf16 = n.ThreadPool(1), n.Rule.sgd, n.Dtype.float32, n.Dtype.bfloat16
    plain, codes, scalars = n.MomentFormat.float32, n.MomentFormat.block8, [1.0] * 7
    buffer = torch.zeros(16)
    good = buffer.data_ptr()
    with pytest.raises(ValueError, match="param: expected an address on a multiple of 4 bytes, got 0"):
        n.step(pool, rule, 0, fp32, 0, good, fp32, plain, [(good, 0)], 8, scalars, 0, 0)
    with pytest.raises(ValueError, match="companion: expected an address on a multiple of 2 bytes"):
        n.step(pool, rule, good, bf16, good + 1, good, bf16, plain, [(good, 0)], 8, scalars, 0, 0)
    with pytest.raises(ValueError, match="exponents: expected an address"):
        n.step(pool, rule, good, fp32, 0, good, fp32, codes, [(good, 0)], 8, scalars, 0, 0)
    with pytest.raises(ValueError, match="numel: expected 0 or more, got -1"):
        n.step(pool, rule, good, fp32, 0, good, fp32, plain, [(good, 0)], -1, scalars, 0, 0)
    assert not buffer.any()


@pytest.mark.usefixtures("target")
def test_traffic_leaves_contents_unchanged() -> None:
    generator = torch.Generator().manual_seed(5)
    pool, numel = n.ThreadPool(2), 34 * n.BLOCK_NUMEL
    streams = [
        torch.randint(0, 256, (numel, item_bytes), dtype=torch.uint8, generator=generator) for item_bytes in (1, 2, 4)
    ]
    before = [stream.clone() for stream in streams]
    for written in (True, False):
        n.move_traffic(pool, [(stream.data_ptr(), stream.shape[1], written) for stream in streams], numel)
        assert all(torch.equal(one, other) for one, other in zip(streams, before, strict=True))
    with pytest.raises(ValueError, match="stream: expected an address on a multiple of 8 bytes"):
        n.move_traffic(pool, [(streams[0].data_ptr() + 1, 1, True)], 1024)
