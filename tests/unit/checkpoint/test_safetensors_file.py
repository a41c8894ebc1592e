from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerooffload import CheckpointError
from zerooffload.checkpoint.safetensors_file import SafetensorsFile, header_of

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5, dtype=torch.int64),
}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def test_slices_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "file") as file:
        assert file.header.metadata == {"format": "pt"}
        part = torch.empty(5)
        file.read("matrix", 3, part)
        assert part.tolist() == [3, 4, 5, 6, 7]
        with pytest.raises(CheckpointError, match="matrix has 12 elements"):
            file.read("matrix", 8, part)
        with pytest.raises(CheckpointError, match=r"asked were 2 from 0 on as torch\.float16"):
            file.read("bf16", 0, torch.empty(2, dtype=torch.float16))


@pytest.mark.parametrize("alignment_bytes", [8, 4096])
def test_a_header_of_ours_is_one_to_the_library(tmp_path: Path, alignment_bytes: int) -> None:
    header = header_of(((name, item.dtype, tuple(item.shape)) for name, item in TENSORS.items()), {"made by": "us"})
    start = header.encode(alignment_bytes)
    assert len(start) % alignment_bytes == 0
    data = b"".join(bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in TENSORS.values())
    assert len(data) == header.data_nbytes
    (tmp_path / "file").write_bytes(start + data)
    read = load_file(tmp_path / "file")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    with SafetensorsFile(tmp_path / "file") as file:
        assert file.header == header


def with_header(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header"),
        (b"\xff" * 16, "header"),
        (struct.pack("<Q", 9) + b"{}", "header"),
        (with_header(b"{,,,}"), "JSON"),
        (with_header(b"[" * 100_000), "JSON"),
        (with_header([1]), "table"),
        (with_header({"a": ENTRY}, bytes(7)), "incomplete"),
        (with_header({"a": ENTRY}, bytes(9)), "1 bytes that belong to no tensor"),
        (with_header({"a": {**ENTRY, "shape": [3]}}, bytes(8)), "cannot have 8 bytes"),
        (with_header({"a": {**ENTRY, "shape": [1 << 62] * 64}}, bytes(8)), "cannot have 8 bytes"),
        (with_header({"a": {**ENTRY, "shape": [1] * 65}}, bytes(8)), "impossible"),
        (with_header({"a": {**ENTRY, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}), "impossible"),
        (with_header({"a": {**ENTRY, "shape": [2.0]}}, bytes(8)), "impossible"),
        (with_header({"a": {**ENTRY, "shape": [True, 2]}}, bytes(8)), "impossible"),
        (with_header({"a": {**ENTRY, "dtype": "F8"}}, bytes(8)), "F8"),
        (with_header({"a": {**ENTRY, "dtype": ["F32"]}}, bytes(8)), "cannot be read"),
        (with_header({"a": {**ENTRY, "data_offsets": [-4, 4]}}, bytes(8)), "impossible"),
        (with_header({"a": {**ENTRY, "data_offsets": [0, 1 << 70]}}, bytes(8)), "impossible"),
        (with_header({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, bytes(16)), "b overlaps"),
        (with_header({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, bytes(20)), "hole before"),
        (with_header({"a": 3}, bytes(8)), "entry"),
        (with_header({"__metadata__": {"a": 1}}), "texts"),
        (with_header(b'{"a":%b,"a":%b}' % (json.dumps(ENTRY).encode(), json.dumps(NEXT).encode()), bytes(16)), "twice"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        SafetensorsFile(tmp_path / "file.safetensors")
    assert "file.safetensors" in str(caught.value)


def test_links_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "missing", "."):
        with pytest.raises(CheckpointError, match=r"cannot open|no plain file"):
            SafetensorsFile(tmp_path / name)
