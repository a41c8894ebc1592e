"""A long training holds what a short one does."""

from __future__ import annotations

from pathlib import Path

from support.long_training import train_long
from support.ranks import run_ranks

FIRST, LAST = 400, 1000
LEAST_LEAK_BYTES = 512
"""Of a step: less than a ticket with the tensor of its buffer, let alone a record of 20 KiB; more than what an
allocator still takes after some use (120 bytes a step, on average over these)."""


def test_a_thousand_steps_leave_nothing(scratch: Path) -> None:
    ((before, after),) = run_ranks(train_long, 1, str(scratch), [FIRST, LAST])
    for what in ("descriptors", "lengths", "blocks"):
        assert after[what] == before[what], what
    for what in ("python threads", "threads"):
        # That of a hidden update may be through, or not.
        assert abs(after[what] - before[what]) <= 1, what
    grown_bytes = after["resident bytes"] - before["resident bytes"]
    assert grown_bytes < LEAST_LEAK_BYTES * (LAST - FIRST)
    files = {"lock", "manifest.json", "record-0.bin", "record-1.bin", "scratch.bin", "states.bin"}
    assert after["lengths"].keys() == files
