"""States of Python objects as JSON: never pickle, so that reading a record runs nobody's code.

What JSON knows stays as it is. The rest becomes an object with one key that starts with "$": `$tuple`, `$float`
(infinite or NaN), `$pairs` (a mapping whose keys are no texts, or start with "$"), `$bytes`, `$tensor` and `$array`
(dtype, shape, and the bytes in base64).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from zerooffload.errors import CheckpointError, ConfigError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


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
        case torch.Tensor():
            json_value = {"$tensor": _tensor(value)}
        case np.ndarray() | np.generic() if value.dtype.kind in "biufc":
            array = np.asarray(value)
            json_value = {"$array": _array(array.dtype.str, array.shape, array.tobytes())}
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
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: from_json(item) for key, item in value.items()}
    try:
        return _tagged(tag, value[tag])
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a recorded {tag} cannot be read: {error}") from error


def _tagged(tag: str, content: Any) -> Any:
    match tag:
        case "$tuple":
            return tuple(from_json(content))
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$pairs":
            return {from_json(key): from_json(item) for key, item in content}
        case "$tensor":
            raw = base64.b64decode(content["bytes"], validate=True)
            # An empty buffer has no tensor.
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            return flat.view(_DTYPES[content["dtype"]]).reshape(content["shape"])
        case "$array":
            raw = base64.b64decode(content["bytes"], validate=True)
            return np.frombuffer(raw, np.dtype(content["dtype"])).reshape(content["shape"]).copy()
    raise CheckpointError(f"a record holds {tag}, which this version does not know")


def _mapping(value: Mapping[Any, Any], whose: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: to_json(item, f"{whose}[{key!r}]") for key, item in value.items()}
    pairs = [[to_json(key, f"a key of {whose}"), to_json(item, f"{whose}[{key!r}]")] for key, item in value.items()]
    return {"$pairs": pairs}


def _tensor(value: torch.Tensor) -> Any:
    contiguous = value.detach().cpu().contiguous()
    # A view of bytes needs a dimension.
    content = contiguous.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _array(str(contiguous.dtype).removeprefix("torch."), contiguous.shape, content)


def _array(dtype: str, shape: Iterable[int], content: bytes) -> Any:
    return {"dtype": dtype, "shape": list(shape), "bytes": _text(content)}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
