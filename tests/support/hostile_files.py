"""Bytes that were never written by us, or were and then changed: only `CheckpointError` may come of them."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from zerooffload.checkpoint.kept_run import parts_of
from zerooffload.checkpoint.manifest import ChunkEntry, GroupEntry, RunEntry, read_manifests
from zerooffload.checkpoint.manifest import Manifest as CheckpointManifest
from zerooffload.checkpoint.manifest import ParamEntry as CheckpointParam
from zerooffload.checkpoint.manifest import StateEntry as CheckpointState
from zerooffload.checkpoint.reshard import join
from zerooffload.checkpoint.shard_files import plan_files
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.journal import FlatEntry, Manifest, ParamEntry, PartEntry, StateEntry, StepRecord
from zerooffload.journal.manifest import read_manifest
from zerooffload.journal.record import decode
from zerooffload.journal.values import from_json, to_json
from zerooffload.tiers import SlotState

MOST_BYTES_A_BYTE = 600
"""Of memory, for each byte of a file: nested JSON of two characters a level takes most."""
MEMORY_BYTES = 1 << 20
"""Whatever the file."""


def sample_record(num_chunks: int = 11) -> StepRecord:
    """A record with every kind of value."""
    state = {
        "objects": {"loader": {"position": 7, "generator": torch.arange(40, dtype=torch.uint8)}},
        "odd": [1.5, float("nan"), float("-inf"), None, True, "text", b"bytes", (1, (2,)), {3: "three", None: 4}],
        "arrays": [np.arange(6.0).reshape(2, 3), np.float32(0.5), torch.ones(2, 2, dtype=torch.bfloat16)],
    }
    chunks = SlotState(
        np.arange(num_chunks, dtype=np.uint8) % 2, np.arange(num_chunks, dtype=np.uint64) << np.uint64(40)
    )
    return StepRecord(bytes(range(16)), 6, 5, chunks, to_json(state, "the state"))


def sample_manifest() -> Manifest:
    """A manifest of one flat with two states."""
    return Manifest(
        run=bytes(range(16)).hex(),
        rank=0,
        world_size=1,
        path=0,
        num_paths=1,
        algorithm="adamw",
        moments="fp32",
        flats=(FlatEntry("block/float32", "float32", True, 5000, 0, (ParamEntry("w", ("v",), (50, 100), 0),)),),
        states=(
            StateEntry("p", 5000, 4096, 2, (PartEntry("param", "float32", 1),), ((0, (0, 16384)), (0, (32768, 36864)))),
            StateEntry("o", 5000, 4096, 2, (PartEntry("exp_avg", "float32", 1),), ((0, (40960, 57344)), (0, (1, 2)))),
        ),
    )


def sample_checkpoint() -> CheckpointManifest:
    """The manifest of a rank that saved one trained and one frozen parameter."""
    states = (
        CheckpointState("param", "float32", 1),
        CheckpointState("exp_avg", "uint8", 1),
        CheckpointState("exp_avg_exponents", "uint8", 128),
    )
    frozen = CheckpointState("param", "int64", 1)
    checksums = {state.name: "0123456789abcdef" for state in states}
    return CheckpointManifest(
        save="a" * 32,
        rank=0,
        num_ranks=1,
        step=5,
        algorithm="adamw",
        moments="8bit",
        groups=(GroupEntry("float32", True, states), GroupEntry("int64", False, (frozen,))),
        params=(
            CheckpointParam("w", ("v",), (50, 100), 0, 0, 5000, 5),
            CheckpointParam("ids", (), (7,), 1, 0, 7, 0),
            CheckpointParam("none", (), (0, 3), 0, 0, 0, 0),
        ),
        chunks=(
            ChunkEntry(4096, checksums),
            ChunkEntry(904, checksums),
            ChunkEntry(7, {"param": "0123456789abcdef"}),
        ),
        run=RunEntry({"loader": {"position": 7}}, {}, [[{"lr": 0.1}]], {}),
        extra=to_json({"tensor": torch.ones(3)}, "extra"),
    )


def sample_promotable() -> Manifest:
    """A manifest that a checkpoint can be made of, with `sample_step`."""
    sample = sample_manifest()
    names = (f"{sample.flats[0].name} {kind}" for kind in ("parameters", "optimizer state"))
    return replace(
        sample, states=tuple(replace(state, name=name) for state, name in zip(sample.states, names, strict=True))
    )


def sample_step() -> StepRecord:
    """The record of a step of `sample_promotable`."""
    state = {"steps": [[3]], "objects": {}, "schedules": {}, "optimizers": [], "random": {}}
    return replace(sample_record(4), state=state)


def signed_record(payload: bytes, header: bytes | None = None) -> bytes:
    """A file whose checksum is right, whatever is in it."""
    start = header if header is not None else sample_record().encode()[:48]
    unsigned = start[:48] + len(payload).to_bytes(8, "little") + bytes(8)
    checksum = xxhash.xxh3_64_intdigest(unsigned + payload)
    return unsigned[:-8] + checksum.to_bytes(8, "little") + payload


def signed_manifest(line: bytes) -> bytes:
    """A file whose checksum is right, whatever is in it."""
    return line + b"\nxxh3-64 " + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"


def mutated(content: bytes, choice: random.Random) -> bytes:
    """Changed in a few places: bits, bytes, pieces cut, doubled, moved or replaced."""
    data = bytearray(content)
    for _ in range(choice.randint(1, 4)):
        at, length = choice.randrange(len(data) + 1), choice.choice((1, 2, 4, 8, 40))
        kind = choice.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << choice.randrange(8)
        elif kind == 1:
            data[at : at + length] = choice.randbytes(length)
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            data[at : at + length] = choice.choice((b"\xff" * 8, bytes(8), b"\x00\x00\x00\x00\x00\x00\x00\x80"))
        elif kind == 5:
            data[at:at] = choice.choice(PIECES)
        else:
            data = data[:at]
    return bytes(data)


PIECES = (
    b"[" * 50,
    b"[" * 20_000,
    b'{"$tuple":[' * 2000,
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"9" * 5000,
    b'"\\ud800"',
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b'"$tensor":',
    b'"$array":',
    b'"$pairs":',
    b'{"$float":"' + b"9" * 400 + b'"}',
    b"null",
    b"-1",
    b"1.5",
    b"18446744073709551616",
    b"true",
    b"{}",
    b"[]",
    b'""',
)


def any_json(choice: random.Random, depth: int = 4) -> Any:
    """A JSON value, often of the shapes that mean something to us."""
    leaves: list[Any] = [
        None,
        True,
        0,
        -1,
        2**63,
        2**70,
        10**300,
        1.5,
        "",
        "AAAA",
        "<f4",
        "float32",
        "O",
        "bool",
        "x" * 50,
    ]
    if depth == 0 or choice.random() < 0.3:
        return choice.choice(leaves)
    inner = [any_json(choice, depth - 1) for _ in range(choice.randint(0, 3))]
    kind = choice.randrange(4)
    if kind == 0:
        return inner
    if kind == 1:
        names = ("a", "$", "$tuple", "steps", "dtype", "shape")
        return {choice.choice(names): item for item in inner}
    tag = choice.choice(("$tuple", "$float", "$bytes", "$pairs", "$tensor", "$array", "$scalar", "$other"))
    if kind == 2:
        return {tag: any_json(choice, depth - 1)}
    content = {
        "dtype": choice.choice(("float32", "bool", "complex64", "<f4", ">i8", "|b1", "quint8", "O", "V8", "<f16", 3)),
        "shape": choice.choice(([], [1], [2, 2], [0], [-1], [2**40], [2**70], "3", [1.0], None, [[1]], 4)),
        "bytes": choice.choice(("", "AAAA", "AAAAAAAAAAAAAAAAAAAAAA==", "A", "AA==", "\xe9", 3, None)),
    }
    return {tag: {name: item for name, item in content.items() if choice.random() < 0.95}}


@dataclass(frozen=True)
class Attempt:
    """A file, and who reads it."""

    what: str
    content: bytes
    read: Callable[[bytes], Any]


def attempts(choice: random.Random, folder: Path) -> Attempt:
    """One of the ways to be hostile."""

    def manifest(content: bytes) -> Any:
        path = folder / "manifest.json"
        path.write_bytes(content)
        found = read_manifest(path)
        return found.run_id, found.without_places()

    def record(content: bytes) -> Any:
        return from_json(decode(content, "record-0.bin").state)

    def checkpoint(content: bytes) -> Any:
        (folder / "rank-00000.json").write_bytes(content)
        found = join(read_manifests(folder), str(folder))
        return from_json(found.manifests[0].extra)

    def promotion(manifest: bytes, step: bytes) -> Any:
        (folder / "manifest.json").write_bytes(manifest)
        try:
            (part,) = parts_of("a" * 32, [(read_manifest(folder / "manifest.json"), decode(step, "record-0.bin"))])
        except ConfigError as error:
            raise CheckpointError("a state is not there") from error
        return plan_files(part.manifest, "here")

    def of_step(content: bytes) -> Any:
        return promotion(sample_promotable().encode(), content)

    def of_manifest(content: bytes) -> Any:
        return promotion(content, step)

    readers = (record, manifest, checkpoint)
    promotable, step = sample_promotable().encode().partition(b"\n")[0], sample_step().encode()
    saved = sample_checkpoint().encode().partition(b"\n")[0]
    written = sample_record(choice.choice((0, 1, 8, 11))).encode()
    line = sample_manifest().encode().partition(b"\n")[0]
    return choice.choice(
        (
            lambda: Attempt("a changed record", mutated(written + bytes(100), choice), record),
            lambda: Attempt("a record of changed bytes", signed_record(mutated(written[64:], choice)), record),
            lambda: Attempt(
                "a record with a changed header",
                signed_record(written[64:], mutated(written[:48], choice)[:48].ljust(48)),
                record,
            ),
            lambda: Attempt(
                "a record with any state", signed_record(bytes(8) + json.dumps(any_json(choice)).encode()), record
            ),
            lambda: Attempt("a changed manifest", mutated(line + b"\n", choice), manifest),
            lambda: Attempt("a manifest of changed bytes", signed_manifest(mutated(line, choice)), manifest),
            lambda: Attempt("a manifest of other values", signed_manifest(_other_values(line, choice)), manifest),
            lambda: Attempt("a checkpoint of changed bytes", signed_manifest(mutated(saved, choice)), checkpoint),
            lambda: Attempt("a checkpoint of other values", signed_manifest(_other_values(saved, choice)), checkpoint),
            lambda: Attempt("a run of changed bytes", signed_manifest(mutated(promotable, choice)), of_manifest),
            lambda: Attempt("a run of other values", signed_manifest(_other_values(promotable, choice)), of_manifest),
            lambda: Attempt("a run with a changed step", signed_record(mutated(step[64:], choice)), of_step),
            lambda: Attempt("noise", choice.randbytes(choice.randrange(300)), choice.choice(readers)),
        )
    )()


def _other_values(line: bytes, choice: random.Random) -> bytes:
    fields = json.loads(line)
    where: Any = fields
    while True:
        key = choice.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if not where[key] or not isinstance(where[key], dict | list) or choice.random() < 0.3:
            where[key] = any_json(choice)
            return json.dumps(fields).encode()
        where = where[key]


def attack(number: int, folder: Path, *, measure: bool = False) -> str:
    """One attempt: how it ended. Raises what must not come out."""
    attempt = attempts(random.Random(number), folder)  # noqa: S311 - reproducible
    if measure:
        tracemalloc.start()
    try:
        attempt.read(attempt.content)
    except CheckpointError:
        outcome = "refused"
    else:
        outcome = "read"
    finally:
        if measure:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak <= MEMORY_BYTES + MOST_BYTES_A_BYTE * len(attempt.content), f"{attempt.what}: {peak} bytes"
    return f"{attempt.what}: {outcome}"
