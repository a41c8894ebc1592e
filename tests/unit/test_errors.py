from __future__ import annotations

import errno
from pathlib import Path

import pytest

from zerooffload import errors


@pytest.mark.parametrize("name", ["ConfigError", "BudgetError", "CheckpointError", "InternalError", "TierIOError"])
def test_every_error_is_one_tree(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.ZeroOffloadError)


def test_an_io_error_is_also_an_oserror_with_errno_and_file() -> None:
    error = errors.TierIOError("read", Path("/disk/states.bin"), errno.EIO)
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert error.filename == "/disk/states.bin"


def test_an_io_error_tells_the_request_and_how_far_it_came() -> None:
    error = errors.TierIOError(
        "write", "/disk/states.bin", errno.ENOSPC, offset_bytes=8192, length_bytes=4096, transferred_bytes=512
    )
    assert (error.operation, error.path) == ("write", "/disk/states.bin")
    assert (error.offset_bytes, error.length_bytes, error.transferred_bytes) == (8192, 4096, 512)
    for word in ("write of /disk/states.bin", "offset 8192", "4096 bytes", "512 transferred", f"errno {errno.ENOSPC}"):
        assert word in str(error)


def test_an_io_error_without_a_range_speaks_of_none_and_ends_with_the_advice() -> None:
    error = errors.TierIOError("open", "/disk", errno.EACCES, advice="Name another path.")
    assert "offset" not in str(error)
    assert str(error).endswith("Name another path.")
