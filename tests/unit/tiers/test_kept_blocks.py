"""Blocks of the nvme tier that outlive the run: two slots, checksums, and files that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated_engine import Fault, SimulatedEngine, Transfers

from zerooffload import TierIOError
from zerooffload.accelerator.pages import populated_pages
from zerooffload.memory import Budget
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import Kept, NvmeBlock, NvmeTier, RecordLayout, RunDirectory

STATES = "zerooffload/rank-00000/states.bin"


def open_tier(folder: Path, recorder: CountingRecorder, *, faults: Sequence[Fault] = (), **options: Any) -> NvmeTier:
    engine = SimulatedEngine(Transfers.EAGER, faults=faults, on_files=True)
    return NvmeTier([RunDirectory(folder)], Budget("nvme", 1 << 30), engine, recorder, **options)


def filled(layout: RecordLayout, chunk: int, value: int) -> torch.Tensor:
    return populated_pages(layout.file_nbytes(chunk)).fill_(value)


def first_byte(block: NvmeBlock, chunk: int = 0, *, checked: bool = False) -> int:
    target = populated_pages(block.layout.file_nbytes(chunk))
    (block.read_checked if checked else block.read)(chunk, target).wait()
    assert bool((target == target[0]).all())
    return int(target[0])


def test_both_slots_are_written_at_first_and_then_in_turns(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    tier = open_tier(tmp_path, recorder)
    block = tier.allocate(layout, "parameters", Kept("p", 2))
    assert tier.budget.leased_bytes == 2 * layout.total_file_nbytes == tier.block_nbytes(layout, Kept("p", 2))
    tier.reserve()
    block.initialize(0, filled(layout, 0, 1)).wait()
    content = (tmp_path / STATES).read_bytes()
    assert {content[offset] for offset in block.places[0].offsets} == {1}
    tier.slots.commit(tier.slots.state())
    for value in (2, 3):
        block.write(0, filled(layout, 0, value)).wait()
        assert first_byte(block, checked=True) == value
        content = (tmp_path / STATES).read_bytes()
        assert [content[offset] for offset in block.places[0].offsets] == [1, value]
    tier.close()
    assert not (tmp_path / STATES).exists()


def test_a_changed_byte_is_found_by_a_checked_read_only(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    for checks_reads in (False, True):
        tier = open_tier(tmp_path, recorder, checks_reads=checks_reads)
        block = tier.allocate(layout, "parameters", Kept("p", 2))
        tier.reserve()
        block.initialize(0, filled(layout, 0, 1)).wait()
        with (tmp_path / STATES).open("r+b") as file:
            file.seek(block.places[0].offsets[0] + 5)
            file.write(b"\x07")
        target = populated_pages(layout.file_nbytes(0))
        with pytest.raises(TierIOError, match=r"states\.bin.*checksum is not that of what was written"):
            block.read_checked(0, target).wait()
        if checks_reads:
            with pytest.raises(TierIOError, match="checksum"):
                block.read(0, target).wait()
        else:
            block.read(0, target).wait()
        tier.close()


def test_a_write_that_failed_is_not_read_before_it_is_repeated(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    tier = open_tier(tmp_path, recorder, faults=[Fault(at=2, operation="write", transferred_bytes=4096)])
    block = tier.allocate(layout, "parameters", Kept("p", 2))
    tier.reserve()
    block.initialize(0, filled(layout, 0, 1)).wait()
    before = tier.slots.state()
    ticket = block.write(0, filled(layout, 0, 2))
    for _ in range(2):
        with pytest.raises(TierIOError, match="write of"):
            ticket.wait()
    for call in (tier.slots.state, lambda: first_byte(block)):
        with pytest.raises(TierIOError, match="write of"):
            call()
    block.write(0, filled(layout, 0, 3)).wait()
    with pytest.raises(TierIOError, match="write of"):
        ticket.wait()
    assert first_byte(block, checked=True) == 3
    tier.slots.restore(before)
    assert first_byte(block, checked=True) == 1
    tier.close()


def test_what_is_kept_is_there_for_the_next_run(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    tier = open_tier(tmp_path, recorder)
    block = tier.allocate(layout, "parameters", Kept("p", 2))
    scratch = tier.allocate(layout, "gradients")
    tier.reserve()
    for chunk in range(layout.num_chunks):
        block.initialize(chunk, filled(layout, chunk, 1)).wait()
        block.write(chunk, filled(layout, chunk, 10 + chunk)).wait()
        scratch.write(chunk, filled(layout, chunk, 9)).wait()
    state, places = tier.slots.state(), {"p": block.places}
    tier.keeps_files = True
    tier.close()
    assert [path.name for path in (tmp_path / STATES).parent.iterdir()] == ["states.bin"]
    tier = open_tier(tmp_path, recorder, kept=places)
    again = tier.allocate(layout, "parameters", Kept("p", 2))
    tier.reserve()
    tier.slots.restore(state)
    assert [first_byte(again, chunk, checked=True) for chunk in range(layout.num_chunks)] == [
        10 + chunk for chunk in range(layout.num_chunks)
    ]
    tier.close()
    assert (tmp_path / STATES).exists()


def test_chunks_go_to_paths_in_proportion_to_what_they_bear(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    engine = SimulatedEngine(Transfers.EAGER, on_files=True)
    directories = [RunDirectory(folder) for folder in folders]
    tier = NvmeTier(directories, Budget("nvme", 1 << 30), engine, recorder, speeds=[3.0, 1.0])
    places = [place for _ in range(20) for place in tier.allocate(layout, "parameters", Kept("p", 2)).places]
    num_first = sum(place.path == 0 for place in places)
    assert abs(num_first / len(places) - 0.75) < 0.1
    extents = sorted((place.path, offset) for place in places for offset in place.offsets)
    assert len(set(extents)) == 2 * len(places)
    tier.close()


@pytest.mark.parametrize("kept", [Kept("p", 2), None], ids=["kept", "not kept"])
def test_what_is_written_ahead_lies_beside_the_record_until_it_is_taken(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout, kept: Kept | None
) -> None:
    tier = open_tier(tmp_path, recorder)
    block = tier.allocate(layout, "parameters", kept, num_places=2)
    tier.reserve()
    assert block.num_places == 2
    block.initialize(1, filled(layout, 1, 1)).wait()
    for value in (2, 3):
        before = value - 1
        assert block.may_write_ahead(1)
        block.write_ahead(1, filled(layout, 1, 9)).wait()
        assert first_byte(block, 1) == before
        block.drop_ahead(1)
        assert first_byte(block, 1) == before
        assert block.may_write_ahead(1)
        block.write_ahead(1, filled(layout, 1, value)).wait()
        assert first_byte(block, 1) == before
        block.take_ahead(1)
        assert first_byte(block, 1, checked=True) == value
        if kept is not None:
            assert not block.may_write_ahead(1)
            tier.slots.commit(tier.slots.state())
    block.write(1, filled(layout, 1, 4)).wait()
    assert first_byte(block, 1) == 4
    tier.close()


def test_a_slot_of_the_ring_holds_what_was_taken_and_not_what_was_dropped(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    """By versions: every write is one, and so is a drop, which makes an older content the record again."""
    tier = open_tier(tmp_path, recorder)
    block = tier.allocate(layout, "parameters", Kept("p", 2))
    tier.reserve()
    block.initialize(0, filled(layout, 0, 1)).wait()
    versions = [block.version(0)]
    block.write_ahead(0, filled(layout, 0, 2)).wait()
    versions.append(block.version(0))
    block.drop_ahead(0)
    versions.append(block.version(0))
    block.write_ahead(0, filled(layout, 0, 3)).wait()
    versions.append(block.version(0))
    assert len(set(versions)) == len(versions)
    block.take_ahead(0)
    assert block.version(0) == versions[-1]
    tier.close()


def test_a_write_ahead_that_failed_loses_nothing(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    tier = open_tier(tmp_path, recorder, faults=[Fault(at=2, operation="write", transferred_bytes=4096)])
    block = tier.allocate(layout, "parameters", Kept("p", 2))
    tier.reserve()
    block.initialize(0, filled(layout, 0, 1)).wait()
    with pytest.raises(TierIOError, match="write of"):
        block.write_ahead(0, filled(layout, 0, 2)).wait()
    assert first_byte(block, checked=True) == 1
    tier.slots.state()
    block.write(0, filled(layout, 0, 3)).wait()
    assert first_byte(block, checked=True) == 3
    tier.close()


def test_a_record_in_one_place_is_not_written_ahead(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    tier = open_tier(tmp_path, recorder)
    blocks = [tier.allocate(layout, "gradients"), tier.allocate(layout, "parameters", Kept("p", 1))]
    tier.reserve()
    for block in blocks:
        assert block.num_places == 1
        assert not block.may_write_ahead(0)
    tier.close()


def test_of_a_block_of_several_shards_one_is_kept(
    tmp_path: Path, recorder: CountingRecorder, layout: RecordLayout
) -> None:
    whole = replace(layout, shards=range(3))
    kept = Kept("p", 2, range(1, 2))
    tier = open_tier(tmp_path, recorder)
    block = tier.allocate(whole, "parameters", kept)
    assert tier.budget.leased_bytes == 4 * layout.total_file_nbytes == tier.block_nbytes(whole, kept)
    tier.reserve()
    assert (block.kept_chunks, len(block.kept_places), len(tier.slots)) == (range(3, 6), 3, 3)
    for chunk in whole.chunks:
        block.initialize(chunk, filled(whole, chunk, chunk)).wait()
    tier.slots.commit(tier.slots.state())
    for chunk in whole.chunks:
        block.write(chunk, filled(whole, chunk, 10 + chunk)).wait()
    assert [first_byte(block, chunk, checked=True) for chunk in whole.chunks] == [10 + chunk for chunk in whole.chunks]
    content = (tmp_path / STATES).read_bytes()
    assert len(content) == 2 * layout.total_file_nbytes
    in_slots = [[content[offset] for offset in place.offsets] for place in block.kept_places]
    assert in_slots == [[chunk, 10 + chunk] for chunk in block.kept_chunks]
    tier.close()
