from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from zerooffload import BudgetError, InternalError, TierIOError
from zerooffload.accelerator.pages import populated_pages
from zerooffload.aio import choose_engine
from zerooffload.memory import Budget
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import NvmeTier, Part, RecordLayout, RunDirectory, Space


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
    return paths


def open_tier(paths: list[Path], recorder: CountingRecorder, limit_bytes: int = 1 << 30) -> NvmeTier:
    directories = [RunDirectory(path) for path in paths]
    return NvmeTier(directories, Budget("nvme", limit_bytes), choose_engine().engine, recorder)


def states(path: Path) -> Path:
    return path / "zerooffload" / "rank-00000" / "scratch.bin"


def test_records_of_all_paths_come_back_and_are_counted(
    folders: list[Path], recorder: CountingRecorder, layout: RecordLayout
) -> None:
    tier = open_tier(folders, recorder)
    blocks = [tier.allocate(layout, "optimizer state") for _ in range(3)]
    tier.reserve()
    sources = {}
    for number, block in enumerate(blocks):
        for chunk in range(layout.num_chunks):
            source = populated_pages(layout.file_nbytes(chunk)).fill_(10 * number + chunk + 1)
            sources[number, chunk] = source
            block.write(chunk, source).wait()
    for (number, chunk), source in sources.items():
        target = populated_pages(source.numel())
        blocks[number].read(chunk, target).wait()
        assert torch.equal(source, target)
    moved = recorder.take().bytes_moved
    assert moved["nvme_read"] == moved["nvme_written"] == 3 * layout.total_file_nbytes
    tier.close()


def test_chunks_spread_evenly_and_every_file_gets_its_whole_length_at_once(
    folders: list[Path], recorder: CountingRecorder
) -> None:
    tier = open_tier(folders, recorder)
    layout = RecordLayout((Part("param", torch.float32),), 30 * 4096, 4096)
    tier.allocate(layout, "parameters")
    assert [states(path).stat().st_size for path in folders] == [0, 0, 0]
    tier.reserve()
    assert [states(path).stat().st_size for path in folders] == [10 * 4096 * 4] * 3
    assert all(states(path).stat().st_blocks * 512 >= 10 * 4096 * 4 for path in folders)
    tier.close()


def test_the_budget_covers_the_padded_records(
    folders: list[Path], recorder: CountingRecorder, layout: RecordLayout
) -> None:
    need = layout.total_file_nbytes
    tier = open_tier(folders, recorder, need)
    tier.allocate(layout, "optimizer state")
    assert tier.budget.leased_bytes == tier.block_nbytes(layout) == need
    with pytest.raises(BudgetError, match="gradients"):
        tier.allocate(layout, "gradients")
    tier.close()
    assert tier.budget.leased_bytes == 0


def test_no_space_can_address_a_file(folders: list[Path], recorder: CountingRecorder, layout: RecordLayout) -> None:
    tier = open_tier(folders[:1], recorder)
    block = tier.allocate(layout, "optimizer state")
    for space in Space:
        assert block.view(space, 0) is None
        assert block.whole(space) is None
    tier.close()


def test_closing_removes_everything_and_closes_the_engine(folders: list[Path], recorder: CountingRecorder) -> None:
    tier = open_tier(folders, recorder)
    block = tier.allocate(RecordLayout((Part("param", torch.float32),), 100, 4096), "parameters")
    tier.reserve()
    tier.close()
    tier.close()
    assert [list(path.iterdir()) for path in folders] == [[], [], []]
    with pytest.raises(InternalError, match="closed"):
        block.write(0, populated_pages(4096))


def test_a_path_that_cannot_be_used_leaves_nothing_on_the_others(
    folders: list[Path], recorder: CountingRecorder
) -> None:
    (folders[1] / "zerooffload" / "rank-00000" / "states.bin").mkdir(parents=True)
    with pytest.raises(TierIOError, match="open"):
        open_tier(folders, recorder)
    assert list(folders[0].iterdir()) == list(folders[2].iterdir()) == []


def test_a_full_disk_is_known_before_training_and_leaves_nothing(
    folders: list[Path], recorder: CountingRecorder, layout: RecordLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_allocate = os.posix_fallocate
    calls = []

    def second_disk_is_full(fd: int, offset: int, length: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        really_allocate(fd, offset, length)

    tier = open_tier(folders, recorder)
    tier.allocate(layout, "optimizer state")
    monkeypatch.setattr(os, "posix_fallocate", second_disk_is_full)
    with pytest.raises(TierIOError, match="free space") as caught:
        tier.reserve()
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, str(states(folders[1])))
    tier.close()
    assert [list(path.iterdir()) for path in folders] == [[], [], []]


def test_chunks_spread_in_proportion_to_the_speeds_of_the_paths(
    folders: list[Path], recorder: CountingRecorder
) -> None:
    directories = [RunDirectory(path) for path in folders]
    engine = choose_engine().engine
    tier = NvmeTier(directories, Budget("nvme", 1 << 30), engine, recorder, speeds=[3e9, 2e9, 1e9])
    tier.allocate(RecordLayout((Part("param", torch.float32),), 60 * 4096, 4096), "parameters")
    tier.reserve()
    assert [states(path).stat().st_size for path in folders] == [count * 4096 * 4 for count in (30, 20, 10)]
    tier.close()
