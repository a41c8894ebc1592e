"""Memory that several processes map."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from zerooffload.accelerator import SharedPages, shared_part_nbytes
from zerooffload.accelerator.shared_pages import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

NBYTES = 10_000

_OTHER = """
import sys
from zerooffload.accelerator import SharedAddress, SharedPages
pages = SharedPages.open(SharedAddress(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])))
pages.map(20480)
assert pages.take(10_000).numel() == 10_000
pages.take(5).fill_(7)
"""


@pytest.fixture
def pages() -> Iterator[SharedPages]:
    made = SharedPages.make()
    yield made
    made.close()


def test_another_process_writes_to_the_same_buffers(pages: SharedPages) -> None:
    address = pages.address
    told = [address.machine, str(address.pid), str(address.descriptor), address.token.hex()]
    subprocess.run([sys.executable, "-P", "-c", _OTHER, *told], check=True)
    pages.map(20480)
    first, second = pages.take(NBYTES), pages.take(5)
    assert second.data_ptr() - first.data_ptr() == 12288
    assert second.tolist() == [7] * 5
    # It begins with the token.
    assert not first[16:].any()


def test_the_buffers_outlive_it() -> None:
    pages = SharedPages.make()
    pages.map(4096)
    buffer = pages.take(4096)
    del pages
    assert int(buffer.fill_(3).sum()) == 3 * 4096


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("machine", "elsewhere", "on another machine"),
        ("token", bytes(16), "is another one here"),
        ("descriptor", 10**6, "No such file"),
    ],
)
def test_what_is_not_the_same_memory_is_refused(pages: SharedPages, field: str, value: object, why: str) -> None:
    with pytest.raises(OSError, match=why):
        SharedPages.open(replace(pages.address, **{field: value}))


def test_a_system_without_such_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(OSError, match="has no files in memory"):
        SharedPages.make()


def test_a_machine_is_its_running_kernel_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_machine()
    assert here == this_machine()
    monkeypatch.setattr("platform.node", lambda: "another container")
    assert this_machine() != here


@pytest.mark.parametrize("num_sharers", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 * 4096, 100_000])
def test_the_parts_are_all_of_it(nbytes: int, num_sharers: int) -> None:
    part = shared_part_nbytes(nbytes, num_sharers)
    assert nbytes <= num_sharers * part < nbytes + num_sharers * 4096
