from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from support.stored_weights import read_weights

from zerooffload import CheckpointError, ConfigError, InternalError
from zerooffload.checkpoint.staged_folder import StagedFolder
from zerooffload.checkpoint.weights_writer import (
    WeightsWriter,
    check_complete,
    create_files,
    index_of,
    plan_files,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5, dtype=torch.int64),
}
SPECS = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]


def write(folder: Path, most_nbytes: int, pieces: Sequence[tuple[int, int | None]] = ((0, None),)) -> None:
    """Each of `pieces` is a writer's part of every tensor."""
    files = plan_files(SPECS, most_nbytes)
    create_files(folder, files)
    written = []
    for start, stop in pieces:
        with WeightsWriter(folder, files) as writer:
            for name, tensor in WEIGHTS.items():
                part = tensor.reshape(-1)[start:stop]
                for first in range(0, part.numel(), 2):
                    writer.write(name, start + first, part[first : first + 2])
            writer.verify()
            written.append(writer.spans)
    check_complete(files, written)
    if len(files) > 1:
        write_json(folder / "model.safetensors.index.json", index_of(files))


def test_the_library_reads_what_two_writers_wrote(tmp_path: Path) -> None:
    write(tmp_path, 1 << 20, [(0, 1), (1, None)])
    for read in (load_file(tmp_path / "model.safetensors"), read_weights(tmp_path)):
        assert read.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read[name], tensor)


def test_files_are_as_large_as_they_may_be(tmp_path: Path) -> None:
    write(tmp_path, 14)
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    # The first is larger than a file may be, and alone; the others fit exactly.
    assert load_file(tmp_path / names[0]).keys() == {"a"}
    assert read_weights(tmp_path).keys() == WEIGHTS.keys()


def test_an_index_counts_what_is_there() -> None:
    index = index_of(plan_files(SPECS, 14))
    assert index["metadata"] == {"total_parameters": 17, "total_size": 62}


def test_what_was_not_written_is_found(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="a from 1 on"):
        write(tmp_path, 1 << 20, [(0, 1), (2, None)])


def test_what_was_written_twice_is_found(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="a from 2 on"):
        write(tmp_path, 1 << 20, [(0, 2), (1, None)])


def test_other_bytes_than_were_written_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:-1] + b"\1", at))
    with pytest.raises(CheckpointError, match="other bytes than were written for a"):
        write(tmp_path, 1 << 20)


def test_a_write_that_does_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def lost(fd: int, data: memoryview, at: int) -> int:
        return len(data) if len(data) == 8 and bytes(data)[4:] == b"\0\0\x40\x40" else pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", lost)
    with pytest.raises(CheckpointError, match="other bytes than were written for a"):
        write(tmp_path, 1 << 20)


def test_a_full_drive_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"No space left on device: .* are needed there"):
        create_files(tmp_path, plan_files(SPECS, 1 << 20))


def test_a_folder_that_is_not_seen_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="all ranks see"):
        WeightsWriter(tmp_path, plan_files(SPECS, 1 << 20))


def staged(directory: Path, *, replace: bool = False) -> StagedFolder:
    folder = StagedFolder(directory, replace=replace)
    folder.create()
    (folder.path / "model.safetensors").write_text("new")
    return folder


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    folder = staged(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    folder.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_text() == "new"


def test_a_folder_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    staged(tmp_path / "out").discard()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    left = staged(tmp_path / "out")
    (left.path / "half").mkdir()
    (left.path / "half" / "file").touch()
    left._unlock()
    staged(tmp_path / "out").commit()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_two_cannot_fill_one_folder(tmp_path: Path) -> None:
    first = staged(tmp_path / "out")
    with pytest.raises(ConfigError, match="another process"):
        staged(tmp_path / "out")
    first.commit()


def test_a_folder_with_files_is_kept_unless_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("old")
    with pytest.raises(ConfigError, match="holds files"):
        StagedFolder(out)
    staged(out, replace=True).commit()
    assert (out / "model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_model_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="no weights"):
        StagedFolder(tmp_path, replace=True)


def test_one_that_was_killed_while_it_replaced_lost_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    staged(out).commit()
    out.rename(tmp_path / ".out.replaced")
    staged(out).discard()
    assert (out / "model.safetensors").read_text() == "new"


@pytest.mark.parametrize("name", ["missing/out", "file"])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder"):
        StagedFolder(tmp_path / name)
