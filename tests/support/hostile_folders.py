"""Model folders and GGUF files of strangers: only a `CheckpointError` that names them may come of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf.quants  # noqa: F401 - what it imports must not count as what a file takes
import torch
from safetensors.torch import save
from support.hostile_files import MEMORY_BYTES, MOST_BYTES_A_BYTE, any_json, mutated
from torch import nn

from zerooffload.checkpoint.gguf_file import GgufFile
from zerooffload.checkpoint.model_weights import match, refuse_incomplete
from zerooffload.checkpoint.stored_tensor import read_whole
from zerooffload.checkpoint.weights_folder import INDEX_FILE, WEIGHTS_FILE, WeightsFolder
from zerooffload.errors import CheckpointError

_PARTS = ("part-0.safetensors", "part-1.safetensors")


class Net(nn.Module):
    """What the folders are said to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def sample_folder(folder: Path, *, sharded: bool) -> None:
    """Write a folder with nothing wrong in it."""
    tensors = Net().state_dict()
    folder.mkdir()
    if not sharded:
        (folder / WEIGHTS_FILE).write_bytes(save(tensors))
        return
    places = {name: _PARTS[number % 2] for number, name in enumerate(tensors)}
    for part in _PARTS:
        (folder / part).write_bytes(save({name: tensors[name] for name in tensors if places[name] == part}))
    index = {"metadata": {"total_size": 100}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All that a loading of `Net` reads."""
    with WeightsFolder(folder) as weights:
        found = match(Net(), weights.tensors(), str(folder))
        refuse_incomplete(found, str(folder), "No")
        return {name: read_whole(tensor) for name, tensor in {**found.params, **found.buffers}.items()}


def _with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _cut_at_header(content: bytes) -> tuple[bytes, bytes]:
    stop = 8 + int.from_bytes(content[:8], "little")
    return content[8:stop], content[stop:]


def _other_values(fields: Any, choice: random.Random) -> bytes:
    """JSON with something else in one place."""
    where: Any = fields
    while True:
        key = choice.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if not where[key] or not isinstance(where[key], dict | list) or choice.random() < 0.3:
            number = choice.choice((0, 1, -1, 4, 8, 48, 2**31, 2**63 - 1, 2**63, 2**64, 2**70))
            where[key] = any_json(choice) if choice.random() < 0.5 else number
            return json.dumps(fields).encode()
        where = where[key]


_NAMES = (
    "../outside.safetensors",
    "/etc/hostname",
    "../model/part-0.safetensors",
    "./part-0.safetensors",
    "part-0.safetensors/",
    "part-0.safetensors\0",
    "",
    ".",
    "..",
    "missing",
    "a" * 5000,
    "\ud800",
    "sub/part-0.safetensors",
)


def _spoil(folder: Path, choice: random.Random, *, sharded: bool) -> str:
    """Change a folder in one way; which."""
    file = folder / (choice.choice(_PARTS) if sharded else WEIGHTS_FILE)
    index = folder / INDEX_FILE
    content = file.read_bytes()
    header, data = _cut_at_header(content)
    outside = folder.parent / "outside.safetensors"

    def other_index() -> bytes:
        return _other_values(json.loads(index.read_bytes()), choice)

    def hostile_name() -> bytes:
        fields = json.loads(index.read_bytes())
        fields["weight_map"][choice.choice(list(fields["weight_map"]))] = choice.choice(_NAMES)
        return json.dumps(fields).encode()

    def link() -> None:
        file.unlink()
        file.symlink_to(
            choice.choice((outside, "../outside.safetensors", ".", file.name, "/dev/zero", "/etc/hostname"))
        )

    def pipe() -> None:
        file.unlink()
        os.mkfifo(file)

    def directory() -> None:
        file.unlink()
        file.mkdir()

    ways: dict[str, Callable[[], object]] = {
        "a changed file": lambda: file.write_bytes(mutated(content, choice)),
        "a changed header": lambda: file.write_bytes(_with_header(mutated(header, choice), data)),
        "a header of other values": lambda: file.write_bytes(
            _with_header(_other_values(json.loads(header), choice), data)
        ),
        "any header": lambda: file.write_bytes(_with_header(json.dumps(any_json(choice)).encode(), data)),
        "a cut file": lambda: file.write_bytes(content[: choice.randrange(len(content))]),
        "noise": lambda: file.write_bytes(choice.randbytes(choice.randrange(300))),
        "a link": link,
        "a pipe": pipe,
        "a directory": directory,
    }
    if sharded:
        ways |= {
            "a changed index": lambda: index.write_bytes(mutated(index.read_bytes(), choice)),
            "an index of other values": lambda: index.write_bytes(
                _other_values(json.loads(index.read_bytes()), choice)
            ),
            "any index": lambda: index.write_bytes(json.dumps(any_json(choice)).encode()),
            "an index with another name": lambda: index.write_bytes(hostile_name()),
        }
    way = choice.choice(list(ways))
    ways[way]()
    return way


def sample_gguf() -> bytes:
    """A file with every kind of metadata and three tensors, one of them in blocks of 32."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    fields = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("b") + text("c"),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.5, 1.0, 2.0),
        text("yes") + struct.pack("<I?", 7, True),
        text("large") + struct.pack("<IQ", 10, 1 << 40),
    ]
    tensors = [
        text("one") + struct.pack("<IQQIQ", 2, 4, 3, 0, 0),
        text("two") + struct.pack("<IQIQ", 1, 8, 1, 64),
        text("three") + struct.pack("<IQQIQ", 2, 64, 2, 8, 96),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(range(96)) + bytes(4 * 34)


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """All that is in it."""
    with GgufFile(file) as opened:
        return opened.fields, {name: read_whole(tensor) for name, tensor in opened.tensors().items()}


def _spoiled_gguf(choice: random.Random) -> tuple[str, bytes]:
    """A file that is changed in one way; which."""
    content = sample_gguf()
    numbers = (0, 1, 31, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)

    def with_numbers() -> bytes:
        data = bytearray(content)
        for _ in range(choice.randint(1, 3)):
            code = choice.choice("IQ")
            number = choice.choice(numbers) % (1 << 8 * struct.calcsize(code))
            struct.pack_into(f"<{code}", data, choice.randrange(4, 400), number)
        return bytes(data)

    ways: dict[str, Callable[[], bytes]] = {
        "a changed GGUF file": lambda: mutated(content, choice),
        "a GGUF file of other numbers": with_numbers,
        "a cut GGUF file": lambda: content[: choice.randrange(len(content))],
    }
    way = choice.choice(list(ways))
    return way, ways[way]()


def attack(number: int, folder: Path, *, measure: bool = False) -> str:
    """One attempt: how it ended. Raises what must not come out."""
    choice = random.Random(number)  # noqa: S311 - reproducible
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    model = root / "model"
    # What a link or a name may lead to is itself sound.
    (root / "outside.safetensors").write_bytes(save(Net().state_dict()))
    reader: Callable[[Path], object] = read
    if choice.random() < 0.25:
        what, content = _spoiled_gguf(choice)
        model.write_bytes(content)
        reader = read_gguf
    else:
        sharded = choice.random() < 0.5
        sample_folder(model, sharded=sharded)
        what = _spoil(model, choice, sharded=sharded)
    before = _contents(root)
    if measure:
        tracemalloc.start()
    message = ""
    try:
        reader(model)
    except CheckpointError as error:
        message = str(error)
    finally:
        if measure:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            content_bytes = sum(len(content) for _, content in before)
            assert peak <= MEMORY_BYTES + MOST_BYTES_A_BYTE * content_bytes, f"{what}: {peak} bytes"
    assert _contents(root) == before, what
    if not message:
        return f"{what}: read"
    assert str(model) in message, message
    assert len(message) < 3000, "a message that nobody reads"
    return f"{what}: refused"


def _contents(root: Path) -> list[tuple[str, bytes]]:
    return [
        (str(path), path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
        for path in sorted(root.rglob("*"))
    ]
