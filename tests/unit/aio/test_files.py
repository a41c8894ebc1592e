from __future__ import annotations

import errno
import logging
import os
import stat
from typing import TYPE_CHECKING

import pytest
import torch
from support.refusing_direct_io import refuse_o_direct

from zerooffload import TierIOError
from zerooffload.aio import Engine, OpenFile
from zerooffload.aio.files import create_file, reserve_space

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_new_file_is_empty_private_and_direct(tmp_path: Path) -> None:
    file = create_file(tmp_path / "states.bin")
    assert file.direct
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.path.stat().st_size == 0
    file.close()
    file.close()
    assert file.fd == -1


def test_what_an_earlier_run_left_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    path.write_bytes(b"old")
    create_file(path).close()
    assert path.stat().st_size == 0


def test_where_o_direct_is_refused_io_is_buffered_and_said_to_be(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_o_direct(monkeypatch, errno.EINVAL)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        file = create_file(tmp_path / "states.bin")
    assert not file.direct
    assert len(caplog.records) == 1
    assert str(file.path) in caplog.text
    assert "O_DIRECT" in caplog.text
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    engine.submit_write(file, 5, source).wait()
    engine.submit_read(file, 5, target).wait()
    file.close()
    assert torch.equal(source, target)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_another_error_of_opening_is_no_reason_to_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_o_direct(monkeypatch, code)
    with pytest.raises(TierIOError) as caught:
        create_file(tmp_path / "states.bin")
    assert (caught.value.errno, caught.value.operation) == (code, "open")


def test_a_file_in_a_missing_folder_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TierIOError) as caught:
        create_file(tmp_path / "missing" / "states.bin")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path == str(tmp_path / "missing" / "states.bin")


def test_reserved_space_is_really_allocated(new_file: Callable[[], OpenFile]) -> None:
    file = new_file()
    reserve_space(file, 1 << 20)
    assert file.path.stat().st_size == 1 << 20
    assert file.path.stat().st_blocks * 512 >= 1 << 20


def test_reserving_nothing_does_nothing(new_file: Callable[[], OpenFile]) -> None:
    file = new_file()
    reserve_space(file, 0)
    assert file.path.stat().st_size == 0


def test_space_that_is_not_there_is_told_with_what_the_run_needs(
    new_file: Callable[[], OpenFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(TierIOError, match=r"needs 1\.00 GiB there") as caught:
        reserve_space(new_file(), 1 << 30)
    assert (caught.value.errno, caught.value.operation, caught.value.length_bytes) == (errno.ENOSPC, "reserve", 1 << 30)


def test_a_symlink_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "states.bin").symlink_to(victim)
    with pytest.raises(TierIOError):
        create_file(tmp_path / "states.bin").close()
    assert victim.read_bytes() == b"precious"
