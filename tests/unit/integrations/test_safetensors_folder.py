from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from zerooffload import CheckpointError
from zerooffload.integrations.huggingface.safetensors_folder import read_weights, weight_files

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5, dtype=torch.int64),
}


def test_weights_are_read_as_the_library_wrote_them(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_weights(tmp_path)
    assert read.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)


def test_each_weight_has_memory_of_its_own(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert {tensor.untyped_storage().nbytes() for tensor in read_weights(tmp_path).values()} == {48, 4, 2, 0, 8}


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save_file({"a": WEIGHTS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": WEIGHTS["b"]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(tmp_path).keys() == {"a", "b"}


@pytest.mark.parametrize("name", ["missing.safetensors", "../one.safetensors", "/etc/hostname"])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="names"):
        weight_files(tmp_path)


def test_a_folder_without_safetensors_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="convert"):
        read_weights(tmp_path)


def with_header(header: object, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header"),
        (b"\xff" * 16, "header"),
        (struct.pack("<Q", 5) + b"{,,,}", "JSON"),
        (with_header({"a": ENTRY}, bytes(7)), "incomplete"),
        (with_header({"a": {**ENTRY, "shape": [3]}}, bytes(8)), "cannot have 8 bytes"),
        (with_header({"a": {**ENTRY, "dtype": "F8"}}, bytes(8)), "F8"),
        (with_header({"a": {**ENTRY, "data_offsets": [-4, 4]}}, bytes(8)), "cannot have"),
        (with_header({"a": 3}, bytes(8)), "entry"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_weights(tmp_path)
    assert "model.safetensors" in str(caught.value)
