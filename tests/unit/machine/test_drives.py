from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from zerooffload.machine import drive_model, drives, file_system, rotates

if TYPE_CHECKING:
    from pathlib import Path


def test_the_nearest_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "with späce"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:5 / {escaped} rw,nosuid shared:1 - tmpfs memory rw\n"
        "3 1 0:6 / /elsewhere rw - nfs4 server:/x rw\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(drives, "_MOUNTS", mounts)
    assert file_system(folder) == ("tmpfs", "memory")
    assert file_system(tmp_path) == ("ext4", "/dev/root")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Drives as the kernel shows them: the folder's number leads to `beneath`, which a test makes."""
    number = tmp_path.stat().st_dev
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / f"{os.major(number)}:{os.minor(number)}").symlink_to(tmp_path / "beneath")
    monkeypatch.setattr(drives, "_DEVICES", tmp_path / "numbers")
    return tmp_path


def make_drive(folder: Path, model: str = "", *, rotational: bool = False) -> Path:
    (folder / "queue").mkdir(parents=True)
    (folder / "queue" / "rotational").write_text(f"{int(rotational)}\n")
    if model:
        (folder / "device").mkdir()
        (folder / "device" / "model").write_text(f"{model:40}\n")
    return folder


def test_a_partition_is_on_its_drive(devices: Path) -> None:
    drive = make_drive(devices / "nvme0n1", "Fast  990")
    (drive / "p1").mkdir()
    (drive / "p1" / "partition").write_text("1\n")
    (devices / "beneath").symlink_to(drive / "p1")
    assert drive_model(devices) == "Fast 990"
    assert not rotates(devices)


def test_an_array_is_all_its_drives(devices: Path) -> None:
    array = devices / "beneath"
    (array / "slaves").mkdir(parents=True)
    for number, drive in enumerate((make_drive(devices / "a", "A"), make_drive(devices / "b", rotational=True))):
        (array / "slaves" / f"{number}").symlink_to(drive)
    assert drive_model(devices) == "A + unknown"
    assert rotates(devices)


def test_what_is_on_no_drive_is_unknown(devices: Path) -> None:
    assert drive_model(devices) == "unknown"
    assert not rotates(devices)
