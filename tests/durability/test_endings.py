"""What a run leaves behind, how it keeps others out, and how the next one finds what there is."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks, started_ranks
from support.reference_training import Outcome, train_plain
from support.stepwise import RECIPE, Stepwise, be_refused, hold, train_without_permission, trainings

import zerooffload as zo

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.timeout(60)]

LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return train_plain(RECIPE)


@pytest.fixture
def begin() -> Iterator[Callable[..., Stepwise]]:
    """`begin(folder, **config)`: a training that is ended when the test is."""
    with trainings(zo.ZeroOffloadError) as begin:
        yield begin


def everything_in(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Mode, owner, time and content of each name, but for what is ours."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "zerooffload" in path.relative_to(folder).parts:
            continue
        status = path.lstat()
        # A folder changes when ours is made in it.
        changed = 0 if path.is_dir() else status.st_mtime_ns
        found[str(path)] = (status.st_mode, status.st_uid, changed, path.read_bytes() if path.is_file() else b"")
    return found


def test_nothing_else_is_touched_and_nobody_else_can_read(tmp_path: Path, begin: Callable[..., Stepwise]) -> None:
    before_umask = os.umask(0)
    try:
        drive = tmp_path / "drive"
        (drive / "data").mkdir(parents=True)
        (drive / "states.bin").write_bytes(b"mine")
        (drive / "data" / "record-0.bin").write_bytes(b"mine too")
        (drive / "manifest.json").symlink_to(drive / "states.bin")
        before = everything_in(tmp_path)
        for _ in range(2):
            training = begin(drive)
            training.step()
            check_modes(drive / "zerooffload")
            training.close()
            check_modes(drive / "zerooffload")
        assert everything_in(tmp_path) == before
        assert {path.name for path in (drive / "zerooffload" / "rank-00000").iterdir()} == {
            "manifest.json",
            "record-0.bin",
            "record-1.bin",
            "states.bin",
        }
    finally:
        os.umask(before_umask)


def check_modes(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.lstat().st_mode) == expected, path


def test_a_second_run_is_told_who_has_the_directory(
    tmp_path: Path, begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    training = begin(tmp_path)
    training.step()
    for overwrite in (False, True):
        ((kind, message),) = run_ranks(be_refused, 1, str(tmp_path), overwrite)
        assert kind == "ConfigError"
        assert f"in use by another run (process {os.getpid()} on {platform.node()})" in message
    assert training.differences_at_the_end(plain) == []
    training.close()


def test_the_lock_of_a_run_that_was_killed_is_taken_over(
    tmp_path: Path, begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    with started_ranks(hold, 1, str(tmp_path), 2, join=False) as ranks:
        (child,) = ranks.processes
        lock = tmp_path / "zerooffload" / "rank-00000" / "lock"
        while not (tmp_path / "holds").exists():
            assert child.is_alive()
            child.join(0.01)
        with pytest.raises(zo.ConfigError, match=rf"in use by another run \(process {child.pid} on {platform.node()}"):
            Stepwise(tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert f"process {child.pid} " in lock.read_text()
    training = begin(tmp_path)
    assert f"process {os.getpid()} " in lock.read_text()
    assert 1 <= training.num_steps <= 2
    assert training.differences_at_the_end(plain) == []
    training.close()
    assert not lock.exists()


def test_a_run_whose_directory_was_removed_leaves_its_successor_alone(
    tmp_path: Path, begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    first = begin(tmp_path)
    shutil.rmtree(tmp_path / "zerooffload")
    second = begin(tmp_path)
    second.step(2)
    first.close()
    with pytest.raises(zo.ConfigError, match="in use"):
        Stepwise(tmp_path)
    second.step()
    second.close()
    third = begin(tmp_path)
    assert third.num_steps == 3
    assert third.differences_at_the_end(plain) == []


@pytest.mark.parametrize("num_removed", range(6))
def test_a_run_that_was_forgotten_half_way_is_none(
    num_removed: int, tmp_path: Path, begin: Callable[..., Stepwise], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two paths: manifest of the first, of the second, records."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    training = begin(tmp_path, nvme_paths=paths)
    left, unlink = [num_removed], Path.unlink

    def fail_after(path: Path, *, missing_ok: bool = False) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail_after)
        training.close()
    again = begin(tmp_path, nvme_paths=paths)
    assert again.num_steps == 0
    again.close()
    assert [list(path.iterdir()) for path in paths] == [[], []]


@pytest.mark.parametrize("cause", ["no thread", "no state"])
def test_a_step_whose_commit_cannot_begin_is_the_last(
    cause: str, tmp_path: Path, begin: Callable[..., Stepwise], plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done, so the next one may not overwrite what the one before left; and nobody waits for it for ever."""
    training = begin(tmp_path)
    training.step(2)
    training.compute_gradients()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> dict[str, Any]:
            raise RuntimeError("cannot")

        if cause == "no thread":
            patch.setattr(threading.Thread, "start", fail)
        else:
            patch.setattr(training.scheduler, "state_dict", fail)
        with pytest.raises(RuntimeError, match="cannot"):
            training.update()
    with pytest.raises(RuntimeError, match="cannot"):
        training.update()
    training.close()
    training = begin(tmp_path)
    assert training.num_steps == 2
    assert training.differences_at_the_end(plain) == []


@pytest.mark.parametrize("io_engine", ["threads", "aiofiles"])
def test_a_directory_that_may_not_be_entered_any_more(io_engine: str, tmp_path: Path) -> None:
    """Root may enter everything, so another user's process does it."""
    package = Path(zo.__file__)
    if not os.geteuid() and not all(folder.stat().st_mode & 0o005 == 0o005 for folder in package.parents):
        pytest.skip(f"another user may not read the package in {package.parent}")
    folder = tmp_path / "nvme"
    folder.mkdir()
    ((told, ending, refused, differences),) = run_ranks(train_without_permission, 1, str(folder), io_engine)
    if io_engine == "threads":
        # Its files stay open.
        assert told == []
    else:
        assert set(told) == {"TierIOError 13"}
    assert ending in {"", "TierIOError 13"}
    assert "not writable (Permission denied)" in refused
    assert differences == []
