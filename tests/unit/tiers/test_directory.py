"""The lock on a directory, and what is left of it."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zerooffload import ConfigError, TierIOError
from zerooffload.tiers import directory
from zerooffload.tiers.directory import RunDirectory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def test_the_directory_is_ours_alone_while_it_is_open_and_gone_afterwards(home: Path) -> None:
    opened = RunDirectory(home)
    assert opened.path == home / "zerooffload" / "rank-00000"
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((opened.path / "lock").stat().st_mode) == 0o600
    opened.close()
    opened.close()
    assert list(home.iterdir()) == []


def test_a_second_run_is_refused_with_the_owner_and_what_to_do(home: Path) -> None:
    first = RunDirectory(home)
    with pytest.raises(ConfigError) as caught:
        RunDirectory(home)
    for word in (str(home), "in use", f"process {os.getpid()} on {platform.node()}", "zo.close", "another path"):
        assert word in str(caught.value)
    assert (first.path / "lock").exists()
    first.close()
    RunDirectory(home).close()


def test_a_refused_run_leaves_no_descriptor(home: Path) -> None:
    first = RunDirectory(home)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ConfigError):
            RunDirectory(home)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    first.close()


def test_the_lock_of_a_killed_process_is_taken_over(home: Path) -> None:
    code = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from zerooffload.tiers.directory import RunDirectory\n"
        "held = RunDirectory(Path(sys.argv[1]))\n"
        "(held.path / 'states.bin').write_bytes(b'half a step')\n"
        "print('locked', flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-P", "-c", code, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "locked\n"
            with pytest.raises(ConfigError, match=f"process {child.pid} "):
                RunDirectory(home)
        finally:
            child.kill()
        child.wait()
    taken = RunDirectory(home)
    assert (taken.path / "lock").read_text().startswith(f"process {os.getpid()} ")
    taken.close()


def test_files_of_others_are_left_alone(home: Path) -> None:
    (home / "data.txt").write_text("mine")
    opened = RunDirectory(home)
    (opened.path / "note.txt").write_text("mine too")
    opened.close()
    assert (home / "data.txt").read_text() == "mine"
    assert (home / "zerooffload" / "rank-00000" / "note.txt").read_text() == "mine too"


def test_a_lock_removed_between_opening_and_locking_is_not_held(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock_and_lose_it(fd: int, operation: int) -> None:
        del fd, operation
        (home / "zerooffload" / "rank-00000" / "lock").unlink()

    monkeypatch.setattr(directory.fcntl, "flock", lock_and_lose_it)
    with pytest.raises(ConfigError, match="try again"):
        RunDirectory(home)


def test_a_lock_that_is_a_symlink_is_not_followed(home: Path) -> None:
    folder = home / "zerooffload" / "rank-00000"
    folder.mkdir(parents=True)
    victim = home / "victim"
    victim.write_text("precious")
    (folder / "lock").symlink_to(victim)
    with pytest.raises(TierIOError):
        RunDirectory(home)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    with pytest.raises(ConfigError, match=f"{path} is not a folder"):
        RunDirectory(path)


def test_a_file_where_the_directory_should_be_is_an_error_with_its_path(home: Path) -> None:
    (home / "zerooffload").write_text("")
    with pytest.raises(TierIOError) as caught:
        RunDirectory(home)
    assert str(home) in caught.value.path


def test_a_folder_without_permission_is_not_writable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        home.chmod(0o500)
    else:
        # Root may write everywhere.
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match="not writable"):
        RunDirectory(home)
    home.chmod(0o700)
    assert list(home.iterdir()) == []
