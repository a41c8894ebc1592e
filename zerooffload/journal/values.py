"""States of Python objects as JSON: never pickle, so that reading a record runs nobody's code.

What JSON knows stays as it is. The rest becomes an object with one key that starts with "$": `$tuple`, `$float`
(infinite or NaN), `$pairs` (a mapping whose keys are no texts, or start with "$"), `$bytes`, `$tensor`, `$array` and
`$scalar`, numpy's (dtype, shape, and the bytes in base64).
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.tiers import dtype_name

# Quantized tensors, and parts of a byte, are more than their bytes.
_DTYPE_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64"
    " complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)}
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, MemoryError)


def to_json(value: Any, whose: str) -> Any:
    """The JSON value that stands for `value`; `whose` begins messages.

    Raises
    ------
    ConfigError
        If it holds something that has no JSON value here.
    """
    if value is None or type(value) in (bool, str, int):
        return value
    match value:
        case float() if type(value) is float:
            json_value: Any = value if math.isfinite(value) else {"$float": repr(value)}
        case list():
            json_value = [to_json(item, f"{whose}[{index}]") for index, item in enumerate(value)]
        case tuple():
            json_value = {"$tuple": [to_json(item, f"{whose}[{index}]") for index, item in enumerate(value)]}
        case bytes():
            json_value = {"$bytes": _text(value)}
        case Mapping():
            json_value = _mapping(value, whose)
        case torch.Tensor() if _is_plain(value):
            json_value = {"$tensor": _tensor(value)}
        case np.ndarray() | np.generic() if value.dtype.kind in "biufc":
            tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
            json_value = {tag: _array(value.dtype.str, value.shape, value.tobytes())}
        case _:
            raise ConfigError(
                f"{whose} is a {type(value).__name__}, which cannot be recorded: a state may hold numbers, texts,"
                " bytes, None, lists, tuples, dictionaries, tensors and numpy arrays"
            )
    return json_value


def from_json(value: Any) -> Any:
    """The value that a JSON value stands for.

    Raises
    ------
    CheckpointError
        If it was not made by `to_json`.
    """
    try:
        return _value(value)
    except RecursionError as error:
        raise CheckpointError(f"a recorded state cannot be read: {error}") from error


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _value(item) for key, item in value.items()}
    try:
        return _tagged(tag, value[tag])
    except RecursionError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(f"a recorded {tag} cannot be read: {error}") from error


def _tagged(tag: str, content: Any) -> Any:
    match tag:
        case "$tuple":
            return tuple(_value(content))
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$pairs":
            return {_value(key): _value(item) for key, item in content}
        case "$tensor":
            raw = base64.b64decode(content["bytes"], validate=True)
            # An empty buffer has no tensor.
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            return flat.view(_DTYPES[content["dtype"]]).reshape(content["shape"])
        case "$array" | "$scalar":
            array = _numpy(content)
            return array if tag == "$array" else array[()]
    raise CheckpointError(f"a record holds {tag}, which this version does not know")


def _mapping(value: Mapping[Any, Any], whose: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: to_json(item, f"{whose}[{key!r}]") for key, item in value.items()}
    pairs = [[_key(key, whose), to_json(item, f"{whose}[{key!r}]")] for key, item in value.items()]
    return {"$pairs": pairs}


def _key(key: Any, whose: str) -> Any:
    if isinstance(key, torch.Tensor):
        raise ConfigError(f"a key of {whose} is a tensor, which would not be found again: use its value")
    return to_json(key, f"a key of {whose}")


def _numpy(content: Any) -> npt.NDArray[Any]:
    if not _NUMPY_DTYPE.fullmatch(content["dtype"]):
        raise ValueError(f"{content['dtype']} is no type of numbers")
    raw = base64.b64decode(content["bytes"], validate=True)
    return np.frombuffer(raw, np.dtype(content["dtype"])).reshape(content["shape"]).copy()


def _is_plain(value: torch.Tensor) -> bool:
    """Whether it is its bytes, shape and dtype, and no more."""
    is_known = _DTYPES.get(dtype_name(value.dtype)) is value.dtype
    return is_known and value.layout is torch.strided and not value.is_meta


def _tensor(value: torch.Tensor) -> Any:
    contiguous = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A view of bytes needs a dimension.
    content = contiguous.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _array(dtype_name(contiguous.dtype), contiguous.shape, content)


def _array(dtype: str, shape: Iterable[int], content: bytes) -> Any:
    return {"dtype": dtype, "shape": list(shape), "bytes": _text(content)}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
