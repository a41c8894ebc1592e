"""What an operation of torch computes, reads and writes, told from its operands' shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zerooffload.planner.byteless import tensors_among
from zerooffload.planner.profiles.model import PassWork

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}

_FUSED_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?(_backward)?"
)
# Of each group of rows its own matrix: torch's own, and what transformers has where torch has none.
_GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
_GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"

_ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
# Their first operand is only written, or only tells a shape.
_UNREAD = frozenset(
    {
        "aten::bernoulli_",
        "aten::copy_",
        "aten::fill_",
        "aten::full_like",
        "aten::new_full",
        "aten::new_ones",
        "aten::new_zeros",
        "aten::normal_",
        "aten::ones_like",
        "aten::rand_like",
        "aten::randn_like",
        "aten::uniform_",
        "aten::zero_",
        "aten::zeros_like",
    }
)
# Of their first operand they read as much as they return.
_SELECTIONS = frozenset({"aten::embedding", "aten::gather", "aten::index", "aten::index_select"})


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> PassWork | None:
    """What an operation takes; None if it only makes views, or memory that nothing is written to."""
    name: str = func._schema.name
    operands, results = list(tensors_among((args, kwargs))), list(tensors_among(result))
    flops = matrix_product_flops(func, args, kwargs, result)
    if flops is not None:
        dtype = next(operand.dtype for operand in operands if operand.is_floating_point())
        return PassWork(flops={_DTYPE_NAMES.get(dtype, str(dtype)): flops}, num_operations=1)
    if name in _ALLOCATIONS or (not func._schema.is_mutable and _are_views(results, operands)):
        return None
    nbytes = [_nbytes_of(operand) for operand in operands]
    if name in _UNREAD:
        nbytes[0] = 0
    elif name in _SELECTIONS:
        nbytes[0] = min(nbytes[0], _nbytes_of(results[0]))
    return PassWork(memory_bytes=sum(nbytes) + sum(map(_nbytes_of, results)), num_operations=1)


def matrix_product_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Floating-point operations, 2 for each multiplication and addition; None if it is no matrix product.

    The formulas are those of `torch.utils.flop_counter`, but for attention (there without the CPU's kernel, and causal
    attention counted whole), for convolutions' gradients (there without groups) and for grouped products (not there).
    """
    name: str = func._schema.name
    if _FUSED_ATTENTION.fullmatch(name):
        return _attention_flops(_by_name(func, args, kwargs), is_backward=name.endswith("_backward"))
    if name == "aten::convolution_backward":
        return _convolution_backward_flops(_by_name(func, args, kwargs))
    if name in _GROUPED or name == _GROUPED_BACKWARD:
        return _grouped_flops(args[0].shape, args[1].shape) * (2 if name == _GROUPED_BACKWARD else 1)
    formula = flop_registry.get(func.overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def attended_pairs(num_queries: int, num_keys: int, *, is_causal: bool) -> int:
    """Of query and key: all, or those in which the key is not behind the query, all that causal kernels compute."""
    if not is_causal:
        return num_queries * num_keys
    square = min(num_queries, num_keys)
    return square * (square + 1) // 2 + (num_queries - square) * num_keys


def _attention_flops(arguments: Mapping[str, Any], *, is_backward: bool) -> int:
    """Scores (as wide as a key) and their product with the values; backward computes the scores once more.

    Of backward's gradients those of queries and keys are as wide as a key, those of scores and values as a value.
    """
    queries, keys, values = (arguments[name].shape for name in ("query", "key", "value"))
    pairs = math.prod(queries[:-2]) * attended_pairs(queries[-2], keys[-2], is_causal=arguments["is_causal"])
    key_numel, value_numel = keys[-1], values[-1]
    return int(2 * pairs * (3 * key_numel + 2 * value_numel if is_backward else key_numel + value_numel))


def _convolution_backward_flops(arguments: Mapping[str, Any]) -> int:
    """The gradients of input and weight each take what forward takes: each output (input, if transposed) meets all of
    its filters' weights once.
    """
    output, batch, weight = (arguments[name].shape for name in ("grad_output", "input", "weight"))
    places = math.prod((batch if arguments["transposed"] else output)[2:])
    num_gradients = sum(arguments["output_mask"][:2])
    return int(2 * batch[0] * places * math.prod(weight) * num_gradients)


def _grouped_flops(left: Sequence[int], right: Sequence[int]) -> int:
    """Rows `[rows, inner]` times `[groups, inner, columns]`, or another of the three that groups cut: all rows, inner
    elements or columns take part once, whichever is cut.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments, defaults included."""
    declared = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in declared}
    return {**defaults, **{argument.name: value for argument, value in zip(declared, args, strict=False)}, **kwargs}


def _are_views(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> bool:
    storages = {operand.untyped_storage()._cdata for operand in operands}
    return all(result.untyped_storage()._cdata in storages for result in results)


def _nbytes_of(tensor: torch.Tensor) -> int:
    """Of its elements, those that an expanded tensor repeats once."""
    repeated = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return tensor.nbytes // repeated if repeated else 0
