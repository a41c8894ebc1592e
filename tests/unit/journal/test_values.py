from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload import CheckpointError, ConfigError
from zerooffload.journal.values import _DTYPES, from_json, to_json


def same(one: Any, other: Any) -> bool:
    """Equal in type and to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        # A key may be NaN: compare in order.
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(bits(one) == bits(other))


def bits(value: Any) -> Any:
    """What two values must have in common."""
    if isinstance(value, float) and type(value) is float:
        return struct.pack("d", value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    return value


def through_json(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "it"), allow_nan=False)))


def tensor_of(dtype: torch.dtype, content: bytes) -> torch.Tensor:
    content = content[: len(content) // dtype.itemsize * dtype.itemsize]
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    raw = torch.tensor(list(content), dtype=torch.uint8)
    return raw.view(dtype)


tensors = st.builds(tensor_of, st.sampled_from(list(_DTYPES.values())), st.binary(max_size=48))
arrays = st.builds(
    lambda code, content: np.frombuffer(content[: len(content) // 16 * 16], code).copy(),
    st.sampled_from(["<f4", ">f8", "<i2", "|u1", "<c16", "<f2", ">u8"]),
    st.binary(max_size=64),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(),
    st.binary(max_size=20),
    st.floats().map(np.float64),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
)
keys = st.one_of(scalars, st.tuples(scalars, scalars), st.sampled_from(["$", "$tensor", "plain"]))
values = st.recursive(
    st.one_of(scalars, tensors, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(values)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(value, through_json(value))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", _DTYPES)
def test_tensors_of_any_shape_and_dtype(name: str) -> None:
    flat = tensor_of(_DTYPES[name], bytes(range(96)))
    for tensor in (flat[:0], flat[:0].reshape(3, 0, 2), flat[0], flat[:6].reshape(2, 3), flat[:6].reshape(3, 2).T):
        assert same(tensor.clone(memory_format=torch.preserve_format), through_json(tensor))


def test_a_tensor_that_is_a_view_comes_back_as_what_it_shows() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(through_json(numbers.conj()), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(through_json(numbers.conj().imag), torch.tensor([-2.0, 4.0]))
    assert torch.equal(through_json(torch.nn.Parameter(torch.ones(2))), torch.ones(2))
    assert torch.equal(through_json(torch.ones(2, 3).expand(4, 2, 3)), torch.ones(4, 2, 3))


def test_mappings_come_back_as_dictionaries() -> None:
    assert through_json(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert through_json(Counter({30: 2, 80: 1})) == {30: 2, 80: 1}
    assert through_json({np.int64(3): "three"}) == {3: "three"}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": [object()]}, r"it\['a'\]\[0\] is a object"),
        ({1, 2}, "set"),
        (torch.ones(2).to_sparse(), "Tensor"),
        (torch.ones(2, device="meta"), "Tensor"),
        (np.array(["a"]), "ndarray"),
        (np.array([object()]), "ndarray"),
        (np.datetime64("2020-01-01"), "datetime64"),
        ({torch.ones(()): 1}, "a key of it"),
        ({("a", frozenset()): 1}, "frozenset"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_its_place(value: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        to_json(value, "it")


HOSTILE = [
    {"$unknown": 1},
    {"$tuple": 3},
    {"$float": "one"},
    {"$float": 10**400},
    {"$float": []},
    {"$bytes": "no base64!"},
    {"$bytes": 3},
    {"$pairs": [[{"$array": {"dtype": "<f4", "shape": [1], "bytes": "AAAAAA=="}}, 1]]},
    {"$pairs": [[1]]},
    {"$pairs": 4},
    {"$tensor": {}},
    {"$tensor": []},
    {"$tensor": {"dtype": "quint8", "shape": [4], "bytes": "AAAAAA=="}},
    {"$tensor": {"dtype": [], "shape": [4], "bytes": "AAAAAA=="}},
    {"$tensor": {"dtype": "float32", "shape": [2**70], "bytes": "AAAAAA=="}},
    {"$tensor": {"dtype": "float32", "shape": [2**40], "bytes": "AAAAAA=="}},
    {"$tensor": {"dtype": "float32", "shape": "1", "bytes": "AAAAAA=="}},
    {"$tensor": {"dtype": "float64", "shape": [1], "bytes": "AAAAAA=="}},
    {"$tensor": {"dtype": "float32", "shape": [-3], "bytes": "AAAAAA=="}},
    {"$array": {"dtype": "O", "shape": [1], "bytes": "AAAAAAAAAAA="}},
    {"$array": {"dtype": "(((", "shape": [1], "bytes": "AAAAAA=="}},
    {"$array": {"dtype": "f4,f4", "shape": [1], "bytes": "AAAAAAAAAAA="}},
    {"$array": {"dtype": "<f4", "shape": [2**70], "bytes": "AAAAAA=="}},
    {"$array": {"dtype": "<f99", "shape": [1], "bytes": "AAAAAA=="}},
    {"$array": {"dtype": 7, "shape": [1], "bytes": "AAAAAA=="}},
    {"$scalar": {"dtype": "<f4", "shape": {"a": 1}, "bytes": "AAAAAA=="}},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: json.dumps(value)[:40])
def test_what_was_not_made_here_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError):
        from_json({"state": [value]})


def test_a_value_nested_without_end_is_refused() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CheckpointError, match="recursion"):
        from_json(value)
    tagged: Any = 1
    for _ in range(5000):
        tagged = {"$tuple": [tagged]}
    with pytest.raises(CheckpointError):
        from_json(tagged)
