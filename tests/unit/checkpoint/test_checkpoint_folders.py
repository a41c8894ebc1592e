"""The checkpoints of a directory: named, found, kept and removed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.leases import pretend_drive

from zerooffload.checkpoint.folders import PartFolder, find_checkpoint, list_checkpoints, remove_leftovers
from zerooffload.errors import CheckpointError, ConfigError

FILES = ("rank-00000.json", "param-00000-of-00001.safetensors")


def save(directory: Path, step: int, keep_last: int | None = None) -> Path:
    folder = PartFolder(directory, step, 1)
    for name in FILES:
        (folder.path / name).write_text("ours")
    path = folder.commit()
    if keep_last is not None:
        folder.keep_last(keep_last)
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_is_the_one_that_was_saved_last_whatever_its_step(tmp_path: Path) -> None:
    for step in (10, 20, 5, 5):
        path = save(tmp_path, step)
        assert find_checkpoint(tmp_path) == path
        assert find_checkpoint(path) == path
    assert [name.step for name in list_checkpoints(tmp_path)] == [10, 20, 5, 5]


def test_as_many_are_kept_as_are_asked_for_and_one_to_be_written_over(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step, keep_last=2)
    kept = ["save-00000004-step-00000003", "save-00000005-step-00000004"]
    assert names(tmp_path) == [".save-00000003-step-00000002.part", *kept]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == kept


def spare(directory: Path, num_ranks: int = 1) -> Path:
    """A file of a checkpoint that was removed, or of a save that was killed."""
    folder = PartFolder(directory, 1, num_ranks)
    for name in (*FILES[:-1], f"param-00000-of-{num_ranks:05d}.safetensors"):
        (folder.path / name).write_text("of the first")
    folder.close()
    return folder.path / name


def test_files_of_states_are_there_to_be_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_drive(tmp_path, monkeypatch)
    path = spare(tmp_path)
    inode = path.stat().st_ino
    folder = PartFolder(tmp_path, 2, 1)
    assert names(tmp_path) == [folder.path.name] == [".save-00000001-step-00000002.part"]
    (left,) = folder.path.iterdir()
    assert (left.name, left.stat().st_ino) == (path.name, inode)
    other = PartFolder(tmp_path, 3, 1)
    assert list(other.path.iterdir()) == []


def with_link(path: Path) -> Iterator[None]:
    os.link(path, path.parents[1] / "of-the-user")
    yield


def open_for_reading(path: Path) -> Iterator[None]:
    with path.open("rb"):
        yield


def mapped(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with content:
        yield


def through_a_link(path: Path) -> Iterator[None]:
    elsewhere = path.parents[1] / "of-the-user"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    yield


def beside_a_file_of_others(path: Path) -> Iterator[None]:
    (path.parent / "notes.txt").write_text("theirs")
    yield


@pytest.mark.parametrize("use", [with_link, open_for_reading, mapped, through_a_link, beside_a_file_of_others])
def test_what_somebody_else_may_see_is_not_written_over(
    use: Callable[[Path], Iterator[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_drive(tmp_path, monkeypatch)
    path = spare(tmp_path)
    with contextmanager(use)(path):
        folder = PartFolder(tmp_path, 2, 1)
        assert list(folder.path.iterdir()) == []
        assert not path.exists()
    if (tmp_path / "of-the-user").exists():
        assert (tmp_path / "of-the-user").read_text() == "of the first"


def test_what_other_ranks_wrote_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_drive(tmp_path, monkeypatch)
    spare(tmp_path, num_ranks=2)
    folder = PartFolder(tmp_path, 2, 1)
    assert list(folder.path.iterdir()) == []


def test_a_file_system_that_cannot_tell_who_has_a_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, command: int, __: int) -> None:
        assert command == fcntl.F_SETLEASE
        raise OSError(errno.EINVAL, "no leases")

    pretend_drive(tmp_path, monkeypatch)
    spare(tmp_path)
    monkeypatch.setattr("zerooffload.checkpoint.folders.fcntl.fcntl", refuse)
    assert list(PartFolder(tmp_path, 2, 1).path.iterdir()) == []


def test_what_is_not_finished_is_no_checkpoint_and_is_removed_by_the_next_save(tmp_path: Path) -> None:
    kept = save(tmp_path, 1)
    killed = PartFolder(tmp_path, 2, 1)
    (killed.path / FILES[0]).write_text("ours")
    killed.close()
    assert find_checkpoint(tmp_path) == kept
    save(tmp_path, 3)
    assert names(tmp_path) == ["save-00000001-step-00000001", "save-00000002-step-00000003"]


def test_what_another_run_is_writing_is_let_alone(tmp_path: Path) -> None:
    other = PartFolder(tmp_path, 7, 1)
    save(tmp_path, 1)
    remove_leftovers(tmp_path)
    assert other.path.is_dir()
    assert other.commit().is_dir()
    assert len(list_checkpoints(tmp_path)) == 2


def test_files_of_others_are_never_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / FILES[0]).write_text("theirs")
    directory = tmp_path / "checkpoints"
    first = save(directory, 1)
    (first / "notes.txt").write_text("theirs")
    (directory / ".save-00000009-step-00000009.part").symlink_to(elsewhere)
    (directory / "save-1").mkdir()
    save(directory, 2, keep_last=1)
    remove_leftovers(directory)
    assert (directory / ".save-00000001-step-00000001.part" / "notes.txt").read_text() == "theirs"
    assert (elsewhere / FILES[0]).read_text() == "theirs"
    assert (directory / "save-1").is_dir()
    assert "is left where it is" in caplog.text


def test_an_abandoned_save_leaves_nothing(tmp_path: Path) -> None:
    folder = PartFolder(tmp_path, 1, 1)
    (folder.path / FILES[1]).write_text("ours")
    folder.abandon()
    folder.abandon()
    assert names(tmp_path) == []


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be saved in"):
        PartFolder(tmp_path / "file", 1, 1)
