from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from zerooffload import CheckpointError
from zerooffload.checkpoint.gguf_file import GgufFile
from zerooffload.checkpoint.stored_tensor import read_whole

pytest.importorskip("gguf")

F32, F16 = 0, 1


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def tensor(name: str, lengths: list[int], kind: int = F32, place: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, place)


def gguf(fields: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_have_their_last_dimension_first(tmp_path: Path, version: int) -> None:
    one, two = torch.arange(6.0), torch.tensor([1.5, -2.0], dtype=torch.float16)
    data = one.numpy().tobytes().ljust(32, b"\0") + two.numpy().tobytes()
    file = tmp_path / "file"
    file.write_bytes(gguf([], [tensor("one", [3, 2]), tensor("two", [2], F16, 32)], data, version))
    with GgufFile(file) as opened:
        read = {name: read_whole(stored) for name, stored in opened.tensors().items()}
    assert torch.equal(read["one"], one.reshape(2, 3))
    assert torch.equal(read["two"], two.float())


EIGHT = bytes(32)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no whole GGUF file"),
        (b"GGML" + bytes(40), "no GGUF file"),
        (gguf([], [], version=1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "expected"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "expected"),
        (gguf([text("a") + struct.pack("<I", 99)], []), "unknown type 99"),
        (gguf([field("a", 9, struct.pack("<IQ", 9, 1))], []), "unknown list of type 9"),
        (gguf([field("a", 9, struct.pack("<IQ", 8, 1 << 60))], []), "expected"),
        (gguf([field("a", 9, struct.pack("<IQ", 0, 1 << 60))], []), "expected"),
        (gguf([field("a", 8, struct.pack("<Q", 1 << 63))], []), "expected"),
        (gguf([field("a", 8, struct.pack("<Q", 1) + b"\xff")], []), "expected a text"),
        (gguf([field("a", 7, b"\1")] * 2, []), "a is there twice"),
        (gguf([field("general.alignment", 4, struct.pack("<I", 0))], []), "impossible alignment"),
        (gguf([], [tensor("a", [8])] * 2, EIGHT), "names a tensor twice"),
        (gguf([], [tensor("a", [8]), tensor("b", [4], place=16)], EIGHT), "b overlaps"),
        (gguf([], [tensor("a", [9])], EIGHT), "incomplete"),
        (gguf([], [tensor("a", [8], place=1 << 63)], EIGHT), "incomplete"),
        (gguf([], [tensor("a", [1] * 9)], EIGHT), "9 dimensions"),
        (gguf([], [tensor("a", [0, 1 << 63])], EIGHT), "impossible shape"),
        (gguf([], [tensor("a", [1 << 62] * 8)], EIGHT), "impossible shape"),
        (gguf([], [tensor("a", [8], kind=8)], EIGHT), "no whole blocks"),
        (gguf([], [tensor("a", [8], kind=24)], EIGHT), "unknown way"),
        (gguf([], [tensor("a", [8], kind=999)], EIGHT), "unknown way"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught, GgufFile(tmp_path / "model.gguf") as file:
        file.tensors()
    assert "model.gguf" in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=r"cannot open|no plain file"):
            GgufFile(path)
