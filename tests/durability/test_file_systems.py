"""Drives that are full, fail, are read-only or go away, as the kernel shows them."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.file_systems import FileSystem, mounted, why_none
from support.reference_training import Outcome, train_plain
from support.stepwise import RECIPE, Stepwise, io_error_of, trainings

import zerooffload as zo
from zerooffload.runtime.run import Run
from zerooffload.sharding.registry import residence_of
from zerooffload.tiers.directory import RunDirectory

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.timeout(60)]

KINDS = ("tmpfs", "ext4")
MIB = 1 << 20
SIZE_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return train_plain(RECIPE)


@pytest.fixture
def mount() -> Iterator[Callable[..., FileSystem]]:
    """`mount(kind)`: gone at the end, which fails if a run has left a file open."""
    with ExitStack() as stack:

        def made(kind: str, nbytes: int = SIZE_BYTES) -> FileSystem:
            if why_none(kind):
                pytest.skip(why_none(kind))
            return stack.enter_context(mounted(kind, nbytes))

        yield made


@pytest.fixture
def begin(mount: Callable[..., FileSystem]) -> Iterator[Callable[..., Stepwise]]:
    """`begin(folder, **config)`: a training that is ended when the test is, before its drive goes."""
    del mount
    with trainings(zo.TierIOError) as begin:
        yield begin


def assert_free(folder: Path) -> None:
    """No run holds it."""
    RunDirectory(folder).close()


def run_of(training: Stepwise) -> Run:
    residence = residence_of(next(training.model.parameters()))
    assert residence is not None
    assert isinstance(residence.run, Run)
    return residence.run


@pytest.mark.parametrize("kind", KINDS)
def test_a_drive_that_is_too_small_is_refused_with_what_is_needed(
    kind: str, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise]
) -> None:
    drive = mount(kind)
    drive.fill(leave_bytes=MIB // 4)
    before = drive.free_bytes
    with pytest.raises(zo.BudgetError, match=r"nvme.*needs \d+ bytes") as caught:
        begin(drive.folder)
    needed = re.search(r"needs (\d+) bytes", str(caught.value))
    assert needed
    assert int(needed.group(1)) > MIB // 4
    assert list(drive.folder.iterdir()) == []
    assert drive.free_bytes == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short_of", ["states.bin", "scratch.bin", "record-0.bin", "record-1.bin"])
def test_space_that_is_not_there_after_all_is_known_before_training(
    short_of: str, kind: str, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    """`nvme_space` says that there is more than there is."""
    drive = mount(kind)
    needed = needed_bytes(drive.folder, begin)
    leave_bytes = 0
    for name, nbytes in needed.items():
        if name == short_of:
            break
        leave_bytes += nbytes
    drive.fill(leave_bytes=leave_bytes + needed[short_of] // 2)
    before = drive.free_bytes
    with pytest.raises(zo.TierIOError, match=rf"reserve of .*{short_of}.*The run needs .* there: free space") as caught:
        begin(drive.folder, nvme_space="64MiB")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.length_bytes == needed[short_of]
    assert list(drive.folder.iterdir()) == []
    assert drive.free_bytes == before
    drive.free()
    training = begin(drive.folder)
    assert training.differences_at_the_end(plain) == []
    training.close()


def needed_bytes(folder: Path, begin: Callable[..., Stepwise]) -> dict[str, int]:
    """Of each file of a run, in the order in which they are reserved."""
    training = begin(folder)
    files = {path.name: path.stat().st_size for path in folder.rglob("*.bin")}
    training.close()
    assert list(folder.iterdir()) == []
    return {name: files[name] for name in ("states.bin", "scratch.bin", "record-0.bin", "record-1.bin")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_does_not_matter_to_a_run(
    kind: str, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    """Everything is reserved, and was written once."""
    drive = mount(kind)
    training = begin(drive.folder)
    drive.fill()
    assert training.differences_at_the_end(plain) == []
    training.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_grows_on_a_full_disk(
    kind: str, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    drive = mount(kind)
    training = begin(drive.folder)
    training.step(2)
    training.ballast.content = bytes(MIB)
    drive.fill()
    training.step()
    training.compute_gradients()
    for _ in range(2):
        with pytest.raises(zo.TierIOError, match=r"reserve of .*record-.*free space") as caught:
            training.update()
        assert caught.value.errno == errno.ENOSPC
    training.close()
    assert_free(drive.folder)
    drive.free()
    training = begin(drive.folder)
    assert (training.num_steps, training.ballast.content) == (2, b"")
    training.ballast.content = bytes(MIB)
    training.step()
    training.close()
    training = begin(drive.folder)
    assert (training.num_steps, training.ballast.content) == (3, bytes(MIB))
    assert training.differences_at_the_end(plain) == []
    training.close()


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_in_the_middle_of_a_step(
    kind: str, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome, *, goes_on: bool
) -> None:
    """On a file system that gives no blocks for good: here somebody takes those of the slots that are written next."""
    drive = mount(kind)
    training = begin(drive.folder)
    training.step(2)
    training.compute_gradients()
    punch_free_slots(training)
    drive.fill()
    for _ in range(2):
        with pytest.raises(zo.TierIOError, match=r"write of .*states.bin at offset \d+, \d+ bytes") as caught:
            training.update()
        assert caught.value.errno == errno.ENOSPC
    drive.free()
    if not goes_on:
        training.close()
        training = begin(drive.folder)
        assert training.num_steps == 2
    else:
        training.update()
    assert training.differences_at_the_end(plain) == []
    training.close()


def punch_free_slots(training: Stepwise) -> None:
    """Give back the blocks of all slots but the first few that no committed step names."""
    run = run_of(training)
    commits, nvme = run._resources.commits, run._resources.nvme
    assert commits is not None
    assert nvme is not None
    commits.settle()
    free = []
    for _, block in run.kept.blocks():
        for chunk, place in enumerate(block.kept_places):
            index = (block.first_index or 0) + chunk
            free.append((1 - nvme.slots._committed[index], place, block.layout.file_nbytes(chunk)))
    for slot, place, nbytes in free[3:]:
        file = nvme.state_files[place.path]
        where = ["--offset", str(place.offsets[slot]), "--length", str(nbytes)]
        subprocess.run(["fallocate", "--punch-hole", *where, str(file.path)], check=True)


def test_a_file_system_that_takes_no_more_writes(
    mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    """As ext4 does after an error."""
    drive = mount("ext4")
    training = begin(drive.folder)
    training.step(2)
    training.compute_gradients()
    drive.fail()
    for _ in range(2):
        # Gradients that were still on their way are lost, which the second update tells, with what the first has told.
        with pytest.raises(zo.ZeroOffloadError) as caught:
            training.update()
        assert io_error_of(caught.value).errno == errno.EROFS
    assert_ends(training)
    drive.mount_again()
    training = begin(drive.folder)
    assert 1 <= training.num_steps <= 2
    assert training.differences_at_the_end(plain) == []
    training.close()


def test_a_run_that_never_finished_a_step_ends_on_a_file_system_that_takes_no_writes(
    mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    drive = mount("ext4")
    training = begin(drive.folder)
    drive.fail()
    with pytest.raises(zo.TierIOError):
        training.step()
    assert_ends(training)
    drive.mount_again()
    training = begin(drive.folder)
    assert training.num_steps == 0
    assert training.differences_at_the_end(plain) == []
    training.close()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_drive_that_is_gone(
    num_steps: int, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    """With all that the file system had not been told to flush."""
    drive = mount("ext4")
    training = begin(drive.folder)
    training.step(num_steps)
    training.compute_gradients()
    drive.vanish()
    for _ in range(2):
        with pytest.raises(zo.ZeroOffloadError) as caught:
            training.update()
        assert io_error_of(caught.value).errno == errno.EIO
    assert_ends(training)
    drive.mount_again()
    training = begin(drive.folder)
    assert num_steps - 1 <= training.num_steps <= num_steps
    assert training.differences_at_the_end(plain) == []
    training.close()


def assert_ends(training: Stepwise) -> None:
    """With an error or without one; nothing is held afterwards, which `mount_again` shows."""
    with suppress(zo.TierIOError):
        training.close()
    training.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_drive_that_is_mounted_read_only(
    num_steps: int, kind: str, mount: Callable[..., FileSystem], begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    drive = mount(kind)
    training = begin(drive.folder)
    training.step(num_steps)
    training.close()
    drive.remount("ro")
    with pytest.raises(zo.ConfigError, match=rf"{drive.folder} is not writable \(Read-only file system\)"):
        begin(drive.folder)
    drive.remount("rw")
    training = begin(drive.folder)
    assert training.num_steps == num_steps
    assert training.differences_at_the_end(plain) == []
    training.close()


@pytest.mark.parametrize("io_engine", ["threads", "aiofiles"])
def test_a_directory_that_is_removed(
    io_engine: str, tmp_path: Path, begin: Callable[..., Stepwise], plain: Outcome
) -> None:
    """What nobody could resume is not committed: the run says so."""
    if io_engine == "threads" and not zo.native.available:
        pytest.skip("no native module")
    training = begin(tmp_path, io_engine=io_engine)
    training.step(2)
    shutil.rmtree(tmp_path / "zerooffload")
    with pytest.raises(zo.TierIOError) as caught:
        training.step(2)
    assert caught.value.errno == errno.ENOENT
    assert_ends(training)
    assert list(tmp_path.iterdir()) == []
    training = begin(tmp_path)
    assert training.num_steps == 0
    assert training.differences_at_the_end(plain) == []
    training.close()
