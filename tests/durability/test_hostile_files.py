"""A short run of `fuzz_journal.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.hostile_files import (
    attack,
    sample_checkpoint,
    sample_manifest,
    sample_promotable,
    sample_record,
    sample_step,
    signed_manifest,
    signed_record,
)

import zerooffload as zo
from zerooffload.checkpoint.kept_run import parts_of
from zerooffload.checkpoint.manifest import read_manifests
from zerooffload.checkpoint.reshard import join
from zerooffload.journal.manifest import read_manifest
from zerooffload.journal.record import decode

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(4))
def test_only_checkpoint_errors_come_out(seed: int, scratch: Path) -> None:
    outcomes = {attack(seed << 32 | number, scratch, measure=not number % 8) for number in range(300)}
    assert {outcome.rpartition(": ")[2] for outcome in outcomes} == {"read", "refused"}


def test_the_samples_themselves_are_read(scratch: Path) -> None:
    record, manifest = sample_record(), sample_manifest()
    encoded = record.encode()
    assert signed_record(encoded[64:]) == encoded
    assert decode(encoded, "record").state == record.state
    path = scratch / "manifest.json"
    path.write_bytes(manifest.encode())
    assert read_manifest(path) == manifest
    assert signed_manifest(manifest.encode().partition(b"\n")[0]) == manifest.encode()


def test_the_sample_of_a_checkpoint_is_read(scratch: Path) -> None:
    manifest = sample_checkpoint()
    (scratch / "rank-00000.json").write_bytes(manifest.encode())
    assert read_manifests(scratch) == [manifest]
    assert set(join([manifest], "here").params) == {"w", "v", "ids", "none"}


def test_the_sample_of_a_run_is_promoted() -> None:
    (part,) = parts_of("a" * 32, [(sample_promotable(), sample_step())])
    assert [(param.name, param.start, param.stop, param.num_steps) for param in part.manifest.params] == [
        ("w", 0, 5000, 3)
    ]
    assert [chunk.numel for chunk in part.manifest.chunks] == [4096, 904]
    assert [[record.offset_bytes for record in chunk.records] for chunk in part.chunks] == [[0, 40960], [36864, 2]]


def test_many_slots_in_a_record_of_few_bytes() -> None:
    """A count of chunks reserves nothing before it is compared with the length."""
    for count in (2**32, 2**63, 2**64 - 1):
        with pytest.raises(zo.CheckpointError, match=f"names {count} chunks"):
            decode(signed_record(count.to_bytes(8, "little") + bytes(100)), "record")
