"""The arithmetic: torch's and the native kernels give the same bits, and the norm is the true one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from support.optimizer_arrays import DTYPES, MOMENTS, Arrays, difference, make_arrays, scalars_of

from zerooffload import ConfigError, native
from zerooffload.optim import low_bits
from zerooffload.optim.kernels import Kernels, NativeKernels, Old, TorchKernels, host_kernels
from zerooffload.optim.record import OptimizerStates
from zerooffload.optim.reference import BLOCK_NUMEL, join_master, read_moment, split_master, write_moment
from zerooffload.optim.rules import RULES
from zerooffload.tiers import RecordLayout

if TYPE_CHECKING:
    from collections.abc import Callable

needs_native = pytest.mark.skipif(not native.available, reason=f"no native module: {native.why_unavailable}")
LENGTHS = [1, 17, BLOCK_NUMEL, 3 * BLOCK_NUMEL + 5]


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 3).to(dtype)


@needs_native
@pytest.mark.parametrize("algorithm", RULES)
@pytest.mark.parametrize("moments", MOMENTS)
def test_native_and_torch_kernels_update_to_the_same_bits(algorithm: str, moments) -> None:
    for turn, numel in enumerate(LENGTHS):
        dtypes = DTYPES[turn % 3], DTYPES[(turn + 1) % 3]
        expected = make_arrays(OptimizerStates(algorithm, moments), dtypes, numel)
        got = expected.copy()
        for step in (1, 2, 3):
            scalars = scalars_of(algorithm, step)
            for kernels, arrays in ((TorchKernels(), expected), (NativeKernels(3), got)):
                kernels.step(scalars, arrays.param, arrays.record, arrays.grad, 4096)
        assert difference(got, expected) == "", (numel, dtypes)


@pytest.mark.parametrize("kernels", [TorchKernels(), pytest.param(host_kernels(3), marks=needs_native)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("where", ["both", "parameters", "record"])
def test_a_step_beside_the_old_values_gives_the_bits_of_one_in_place(
    where: str, moments, dtype: torch.dtype, kernels: Kernels
) -> None:
    states = OptimizerStates("adamw", moments)
    for numel in LENGTHS:
        expected = make_arrays(states, (dtype, dtype), numel)
        layout = RecordLayout(states.parts(dtype), numel, 4 * BLOCK_NUMEL)
        old, new = (layout.split(0, torch.full((layout.file_nbytes(0),), 0xFF, dtype=torch.uint8)) for _ in range(2))
        for name, part in expected.record.items():
            old[name].copy_(part)
        param = expected.param.clone()
        beside = torch.full_like(param, math.nan) if where != "record" else param
        record = new if where != "parameters" else old
        kept = param.clone(), {name: part.clone() for name, part in old.items()}
        scalars = scalars_of("adamw", 3)
        kernels.step(scalars, beside, record, expected.grad, 4096, old=Old(param, old))
        kernels.step(scalars, expected.param, expected.record, expected.grad, 4096)
        assert difference(Arrays(beside, record, expected.grad), expected) == ""
        if where != "record":
            assert same_bytes(param, kept[0])
        if where != "parameters":
            assert all(same_bytes(old[name], part) for name, part in kept[1].items())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@needs_native
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_and_torch_kernels_sum_add_and_replace_to_the_same_bits(numel: int, dtype: torch.dtype) -> None:
    both: list[Kernels] = [TorchKernels(), NativeKernels(2)]
    grad = random(numel, 1, dtype)
    first, second = (kernels.square_sums(grad) for kernels in both)
    assert torch.equal(first, second)
    for target_dtype in {dtype, torch.float32}:
        for operation in ("add", "replace"):
            totals = [random(numel, 2, target_dtype) for _ in both]
            sums = [getattr(kernels, operation)(total, grad) for kernels, total in zip(both, totals, strict=True)]
            assert torch.equal(totals[0], totals[1])
            assert torch.equal(sums[0], sums[1])
            assert torch.equal(sums[0], both[0].square_sums(totals[0]))
            before = random(numel, 2, target_dtype)
            expected = before + grad if operation == "add" else grad.to(target_dtype)
            assert torch.equal(totals[0], expected)


@pytest.mark.parametrize("algorithm", RULES)
def test_parameters_of_16_bits_train_the_fp32_master_bit_for_bit(algorithm: str) -> None:
    states = OptimizerStates(algorithm)
    start, grad = random(5000, 0), random(5000, 1, torch.bfloat16)
    zeros = {moment.name: torch.zeros(5000) for moment in RULES[algorithm].moments}
    masters, moments = [], []
    for dtype in DTYPES:
        param, record = start.to(dtype, copy=True), {name: value.clone() for name, value in zeros.items()}
        if dtype is torch.bfloat16:
            param, record["remainder"] = split_master(start)
        elif dtype is torch.float16:
            record["master"] = start.clone()
        assert {part.name for part in states.parts(dtype)} == record.keys()
        for step in (1, 2, 3):
            TorchKernels().step(scalars_of(algorithm, step), param, record, grad, 0)
        if dtype is torch.bfloat16:
            masters.append(join_master(param, record["remainder"]))
        else:
            masters.append(record.get("master", param))
            assert torch.equal(param, masters[-1].to(dtype))
        moments.append([record[name] for name in zeros])
    for master, own in zip(masters, moments, strict=True):
        assert torch.equal(master, masters[0])
        assert all(torch.equal(one, other) for one, other in zip(own, moments[0], strict=True))


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


@pytest.mark.usefixtures("wrong_target")
def test_a_target_that_is_not_there_is_refused_with_those_that_are(offload: Callable[..., object]) -> None:
    targets = ", ".join(native.module.supported_targets())
    words = f"ZEROOFFLOAD_CPU_TARGET='avx9' is not a CPU target of this build and this CPU: set it to one of {targets},"
    with pytest.raises(ConfigError, match=words):
        host_kernels(1)
    with pytest.raises(ConfigError, match=words):
        offload(torch.nn.Linear(3, 3))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("algorithm", RULES)
def test_a_moment_that_was_read_is_written_back_as_it_was(algorithm: str, moments) -> None:
    arrays = make_arrays(OptimizerStates(algorithm, moments), (torch.float32, torch.float32), 3000, seed=5)
    after = arrays.copy()
    for moment in RULES[algorithm].moments:
        value = read_moment(after.record, moment)
        assert value.dtype is torch.float32
        write_moment(after.record, moment, value, low_bits.NEAREST)
        torch.testing.assert_close(read_moment(after.record, moment), value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "own"),
    [(torch.float32, []), (torch.bfloat16, ["remainder"]), (torch.float16, ["master"])],
)
def test_the_record_is_what_is_missing_to_a_master_and_the_moments(dtype: torch.dtype, own: list[str]) -> None:
    for algorithm, rule in RULES.items():
        names = [moment.name for moment in rule.moments]
        for moments in ("fp32", "bf16"):
            assert [part.name for part in OptimizerStates(algorithm, moments).parts(dtype)] == own + names
        with_scales = [name for moment in names for name in (moment, f"{moment}_exponents")]
        assert [part.name for part in OptimizerStates(algorithm, "8bit").parts(dtype)] == own + with_scales


def test_bytes_of_an_element() -> None:
    """Of AdamW's record: two moments, and for the 8-bit ones two scales for each 128 elements."""

    def nbytes(moments) -> int:
        parts = OptimizerStates("adamw", moments).parts(torch.float32)
        return sum(part.num_items(128) * part.dtype.itemsize for part in parts)

    assert [nbytes(moments) for moments in MOMENTS] == [128 * 8, 128 * 4, 128 * 2 + 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64])
def test_a_dtype_that_cannot_be_trained_is_refused_with_those_that_can(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"{dtype}.*float32, bfloat16, float16"):
        OptimizerStates().parts(dtype)
