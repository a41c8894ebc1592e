from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.hostile_files import signed_manifest

from zerooffload import CheckpointError
from zerooffload.journal.manifest import first_difference, read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from zerooffload.journal import Manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manifest.json"


def test_what_was_encoded_is_read(manifest: Manifest, path: Path) -> None:
    path.write_bytes(manifest.encode())
    assert read_manifest(path) == manifest
    assert read_manifest(path).run_id == bytes(range(16))
    assert path.read_bytes().count(b"\n") == 2


def test_any_change_is_found(manifest: Manifest, path: Path) -> None:
    content = manifest.encode()
    for changed in (
        content[:-1],
        content + b"x",
        b"x" + content,
        content[1:],
        b"",
        b"\n",
        content.replace(b"adamw", b"adamx"),
    ):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            read_manifest(path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": "other"}, "no manifest"),
        ({"version": 2}, "version 2"),
        ({"version": "1"}, "version 1"),
        ({"run": "no hexadecimal"}, "cannot be read"),
        ({"run": ""}, "cannot be read"),
        ({"states": 3}, "cannot be read"),
        ({"rank": None}, "cannot be read"),
    ],
)
def test_what_is_signed_but_wrong(manifest: Manifest, path: Path, changes: dict[str, Any], what: str) -> None:
    fields = json.loads(manifest.encode().partition(b"\n")[0])
    path.write_bytes(signed_manifest(json.dumps({**fields, **changes}).encode()))
    with pytest.raises(CheckpointError, match=what):
        read_manifest(path)


@pytest.mark.parametrize("line", [b"[]", b"3", b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_signed_but_nothing_of_ours(path: Path, line: bytes) -> None:
    path.write_bytes(signed_manifest(line))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(path)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json"):
        read_manifest(path)


def test_places_and_the_run_make_no_difference(manifest: Manifest) -> None:
    moved = replace(
        manifest, run="0" * 32, path=1, states=tuple(replace(state, chunks=()) for state in manifest.states)
    )
    assert first_difference(manifest, moved) == ""


def test_differences_are_named(manifest: Manifest) -> None:
    (flat,), (param, optimizer) = manifest.flats, manifest.states
    for other, words in (
        (replace(manifest, world_size=2), "world_size was 1, now it is 2"),
        (replace(manifest, num_paths=2), "num_paths was 1, now it is 2"),
        (replace(manifest, algorithm="lion"), "algorithm was adamw, now it is lion"),
        (replace(manifest, moments="8bit"), "moments was fp32, now it is 8bit"),
        (replace(manifest, flats=(replace(flat, numel=6000),)), "numel of block/float32 is not what it was"),
        (replace(manifest, flats=(flat, flat)), "there were 1 flats, now there are 2"),
        (replace(manifest, states=(param,)), "there were 2 states, now there are 1"),
        (
            replace(manifest, states=(param, replace(optimizer, chunk_numel=8192))),
            "chunk_numel of o is not what it was",
        ),
    ):
        assert first_difference(manifest, other) == words
