from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from zerooffload.planner.operations import attended_pairs, matrix_product_flops, work_of
from zerooffload.planner.profiles.model import PassWork

Run = Callable[..., torch.Tensor]


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work = PassWork()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        work = work_of(func, args, kwargs or {}, result)
        if work is not None:
            self.work += work
        return result


def forward_and_backward(run: Run, *tensors: torch.Tensor) -> tuple[PassWork, PassWork]:
    """What an operation takes, and its backward for a gradient that is there."""
    with Watching() as forward:
        result = run(*tensors)
    gradient = torch.ones_like(result)
    with Watching() as backward:
        result.backward(gradient)
    return forward.work, backward.work


def trainable(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


ROWS, INDICES = torch.tensor([7, 7, 1]), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("run", "nbytes"),
    [
        (lambda x: x + x, 3 * 4 * 60),
        (lambda x: x.add_(1), 2 * 4 * 60),
        (lambda x: x.sum(), 4 * 60 + 4),
        (lambda x: x.to(torch.bfloat16), (4 + 2) * 60),
        (lambda x: x[:, :, :1] + 1, 2 * 4 * 20),
        # 3 elements, which 20 rows share.
        (lambda x: x + x[0, 0].expand(10, 2, 3), 2 * 4 * 60 + 4 * 3),
        (lambda x: x.copy_(torch.empty(10, 2, 3)), 2 * 4 * 60),
        (lambda x: x.zero_(), 4 * 60),
        (torch.zeros_like, 4 * 60),
        # The rows that are asked for, not the whole table.
        (lambda x: functional.embedding(ROWS, x.view(10, 6)), 8 * 3 + 2 * 4 * 3 * 6),
        (lambda x: x[INDICES], 8 * 2 + 2 * 4 * 2 * 6),
    ],
)  # fmt: skip
def test_other_operations_read_their_operands_and_write_their_results(run: Run, nbytes: int) -> None:
    batch = torch.ones(10, 2, 3)
    with Watching() as watching:
        run(batch)
    assert watching.work == PassWork(memory_bytes=nbytes, num_operations=1)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(20, 3).t()[None].expand(4, 3, 20)[:, 1:].unbind(),
        lambda x: x.reshape(60).detach(),
        lambda x: x.contiguous().to(torch.float32),
        lambda x: (torch.empty(4), torch.empty_like(x), x.new_empty(3)),
    ],
)
def test_views_and_memory_that_is_not_written_are_no_work(run: Run) -> None:
    batch = torch.ones(10, 2, 3)
    with Watching() as watching:
        run(batch)
    assert watching.work == PassWork()


@pytest.mark.parametrize("dtype_name", ["fp32", "bf16", "fp64"])
def test_products_count_in_their_dtype_and_backward_twice(dtype_name: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[dtype_name]
    batch, weight, bias = (trainable(*shape, dtype=dtype) for shape in [(5, 3), (7, 3), (7,)])
    flops = 2 * 5 * 3 * 7
    forward, backward = forward_and_backward(functional.linear, batch, weight, bias)
    assert forward == PassWork(flops={dtype_name: flops}, num_operations=1)
    assert backward.flops == {dtype_name: 2 * flops}
    # The bias's gradient.
    assert backward.memory_bytes == (5 * 7 + 7) * dtype.itemsize
    batches, matrices = trainable(4, 5, 3, dtype=dtype), trainable(4, 3, 7, dtype=dtype)
    forward, backward = forward_and_backward(torch.bmm, batches, matrices)
    assert (forward.flops, backward.flops) == ({dtype_name: 4 * flops}, {dtype_name: 8 * flops})


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("needs", [(True, True), (False, True), (True, False)])
def test_gradients_of_convolutions_take_what_forward_takes(
    groups: int, needs: tuple[bool, bool], *, transposed: bool
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 12, 3, stride=2, padding=1, groups=groups)
    layer.weight.requires_grad_(needs[1])
    images = torch.ones(2, 8, 9, 9, requires_grad=needs[0])
    forward, backward = forward_and_backward(layer, images)
    # Each input of a transposed one, each output of the other: [2, ., 9, 9] and [2, ., 5, 5].
    places = 2 * (81 if transposed else 25)
    flops = 2 * places * (8 // groups) * 12 * 9
    assert forward.flops == {"fp32": flops}
    assert backward.flops == {"fp32": sum(needs) * flops}


def test_causal_attention_counts_the_pairs_that_it_computes() -> None:
    assert attended_pairs(5, 5, is_causal=False) == 25
    for num_queries, num_keys in [(5, 5), (3, 5), (5, 3)]:
        mask = torch.ones(num_queries, num_keys).tril()
        assert attended_pairs(num_queries, num_keys, is_causal=True) == mask.sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_of_the_cpu_counts(*, is_causal: bool) -> None:
    batch, heads, length, width = 2, 3, 6, 8
    tensors = [trainable(batch, heads, length, width) for _ in range(3)]

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        forward, backward = forward_and_backward(attention, *tensors)
    product = 2 * batch * heads * width * (length * (length + 1) // 2 if is_causal else length**2)
    # Scores and their product with values; both gradients of each of these, and the scores again.
    assert forward.flops == {"fp32": 2 * product}
    assert backward.flops == {"fp32": 5 * product}
    assert (forward.num_operations, forward.memory_bytes) == (1, 0)
    if not is_causal:
        with sdpa_kernel(SDPBackend.MATH):
            forward, backward = forward_and_backward(attention, *tensors)
        assert (forward.flops, backward.flops) == ({"fp32": 2 * product}, {"fp32": 4 * product})


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_fused_attention_of_gpus_counts_alike(kernel: str) -> None:
    queries, keys, values = torch.ones(2, 4, 6, 8), torch.ones(2, 2, 6, 8), torch.ones(2, 2, 6, 16)
    func = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    flags = {"flash": (0.0, True, False), "efficient": (None, True, 0.0, True), "cudnn": (None, True, 0.0, True)}[
        kernel
    ]
    assert matrix_product_flops(func, (queries, keys, values, *flags), {}, None) == 2 * 2 * 4 * 21 * (8 + 16)
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    arguments = {"query": queries, "key": keys, "value": values, "is_causal": True}
    assert matrix_product_flops(backward, (), arguments, None) == 2 * 2 * 4 * 21 * (3 * 8 + 2 * 16)


def test_grouped_products_count_each_row_once() -> None:
    rows, matrices = trainable(32, 16, dtype=torch.bfloat16), trainable(4, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    flops = 2 * 32 * 16 * 8
    forward, backward = forward_and_backward(lambda *both: torch._grouped_mm(*both, offs=ends), rows, matrices)
    assert (forward.flops, backward.flops) == ({"bf16": flops}, {"bf16": 2 * flops})
    # With which transformers works where torch has none.
    pytest.importorskip("transformers.integrations.moe")
    forward, backward = forward_and_backward(
        lambda *both: torch.ops.transformers.grouped_mm_fallback(*both, ends), rows, matrices
    )
    assert (forward.flops, backward.flops) == ({"bf16": flops}, {"bf16": 2 * flops})
