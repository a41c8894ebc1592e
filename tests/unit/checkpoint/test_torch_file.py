from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
import torch

from zerooffload import CheckpointError
from zerooffload.checkpoint.torch_file import Inert, PickledTensor, read_torch_file, unpickle

if TYPE_CHECKING:
    from pathlib import Path

BASE = torch.arange(24, dtype=torch.float32)
CONTENT: dict[str, Any] = {
    "f": BASE.view(4, 6),
    "part": BASE[6:12],
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "param": torch.nn.Parameter(torch.ones(2)),
    "step": 3,
    "nested": OrderedDict(a=[1, (2.5, None)], dtype=torch.float16, size=torch.Size([1, 2])),
}


def values(stored: PickledTensor) -> torch.Tensor:
    target = torch.empty(stored.numel, dtype=stored.dtype)
    fd = os.open(stored.path, os.O_RDONLY)
    stored.read(fd, 0, target)
    os.close(fd)
    return target.view(stored.shape)


@pytest.mark.parametrize("offset", [0, 100])
def test_what_was_saved_is_read(tmp_path: Path, offset: int) -> None:
    torch.save(CONTENT, tmp_path / "alone")
    raw = (tmp_path / "alone").read_bytes()
    (tmp_path / "file").write_bytes(b"x" * offset + raw + b"y" * 50)
    found = read_torch_file(tmp_path / "file", {}, offset=offset, nbytes=len(raw))
    assert found.keys() == CONTENT.keys()
    assert (found["step"], found["nested"]) == (3, CONTENT["nested"])
    for name, tensor in CONTENT.items():
        if isinstance(tensor, torch.Tensor):
            assert found[name].dtype is tensor.dtype
            assert torch.equal(values(found[name]), tensor)


class Color(Enum):
    RED = "red"


class Attribute:
    """Pickled as `getattr(kind, name)`."""

    def __init__(self, kind: type, name: str) -> None:
        self.asked = (kind, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.asked


def test_members_of_enums_may_be_named_as_some_pythons_do(tmp_path: Path) -> None:
    allowed = {(Color.__module__, "Color"): Color, ("collections", "OrderedDict"): OrderedDict}
    assert unpickle(pickle.dumps(Attribute(Color, "RED")), allowed, tmp_path) is Color.RED
    for kind, name in ((Color, "__class__"), (Color, "mro"), (OrderedDict, "fromkeys")):
        with pytest.raises(CheckpointError, match="asks for an attribute"):
            unpickle(pickle.dumps(Attribute(kind, name)), allowed, tmp_path)
    with pytest.raises(CheckpointError, match="asks for"):
        unpickle(pickle.dumps(Attribute(Color, "RED")), {}, tmp_path)


def test_a_slice_is_read_alone(tmp_path: Path) -> None:
    torch.save(BASE, tmp_path / "file")
    stored = read_torch_file(tmp_path / "file", {})
    target = torch.empty(3)
    with (tmp_path / "file").open("rb") as file:
        stored.read(file.fileno(), 5, target)
        with pytest.raises(CheckpointError, match="lacks"):
            stored.read(file.fileno(), 22, target)
    assert target.tolist() == [5, 6, 7]


@pytest.mark.parametrize("of_parameter", [False, True])
def test_attributes_of_tensors_are_left(tmp_path: Path, *, of_parameter: bool) -> None:
    tensor = torch.nn.Parameter(BASE) if of_parameter else BASE.clone()
    tensor.name_of_it = "x"
    torch.save({"t": tensor}, tmp_path / "file")
    assert torch.equal(values(read_torch_file(tmp_path / "file", {})["t"]), BASE)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


class Known:
    def __init__(self) -> None:
        self.value = 7


def test_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Harmful()}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir, which could run code"):
        read_torch_file(tmp_path / "file", {})
    found = read_torch_file(tmp_path / "file", {}, inert=True)["x"]
    assert isinstance(found, Inert)
    assert found.args == ("harm",)
    assert not (tmp_path / "harm").exists()


def test_other_classes_are_refused_or_inert(tmp_path: Path) -> None:
    raw = pickle.dumps(Known())
    with pytest.raises(CheckpointError, match="Known"):
        unpickle(raw, {}, tmp_path)
    assert unpickle(raw, {}, tmp_path, inert=True).state == {"value": 7}
    assert unpickle(raw, {(Known.__module__, "Known"): Known}, tmp_path).value == 7


@pytest.mark.parametrize("damage", ["short", "noise", "empty", "compressed", "long"])
def test_what_is_not_whole_is_told(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    torch.save(CONTENT, path)
    raw, nbytes = path.read_bytes(), None
    if damage == "compressed":
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
    elif damage == "long":
        nbytes = len(raw) + 1
    else:
        path.write_bytes({"short": raw[:-200], "noise": b"noise" * 99, "empty": b""}[damage])
    with pytest.raises(CheckpointError, match="file"):
        read_torch_file(path, {}, nbytes=nbytes)


@pytest.mark.parametrize("flipped", range(0, 700, 7))
def test_any_byte_may_be_another(tmp_path: Path, flipped: int) -> None:
    """It is read, or a `CheckpointError`."""
    path = tmp_path / "file"
    torch.save({"a": BASE, "b": [1, "x"]}, path)
    raw = bytearray(path.read_bytes())
    raw[flipped] ^= 0xFF
    path.write_bytes(raw)
    with suppress(CheckpointError):
        read_torch_file(path, {})


def test_a_transposed_tensor_is_refused(tmp_path: Path) -> None:
    torch.save(BASE.view(4, 6).t(), tmp_path / "file")
    with pytest.raises(CheckpointError, match="row by row"):
        read_torch_file(tmp_path / "file", {})
