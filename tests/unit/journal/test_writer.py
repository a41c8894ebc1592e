from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.drive_images import Begun, Committed, FlushDone, Image
from support.recording_engine import Log, RecordingEngine, recording
from support.simulated_engine import SimulatedEngine, Transfers

from zerooffload import TierIOError
from zerooffload.aio import OpenFile
from zerooffload.aio.files import create_file, reserve_space
from zerooffload.journal import Journal, StepRecord, forget_run, read_history, record_capacity
from zerooffload.tiers import SlotState

if TYPE_CHECKING:
    from zerooffload.journal import Manifest

NUM_CHUNKS = 4


def record(sequence: int, state: object = None) -> StepRecord:
    chunks = SlotState(np.zeros(NUM_CHUNKS, np.uint8), np.zeros(NUM_CHUNKS, np.uint64))
    return StepRecord(bytes(range(16)), sequence, sequence, chunks, state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "zerooffload" / "rank-00000"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def states(folder: Path) -> Iterator[OpenFile]:
    file = create_file(folder / "states.bin")
    reserve_space(file, 4096)
    yield file
    file.close()


@pytest.fixture
def log(folder: Path, states: OpenFile) -> Iterator[Log]:
    del states
    with recording(folder.parents[1]) as log:
        yield log


def journal(folder: Path, log: Log, states: OpenFile, *, is_new: bool = True) -> Journal:
    return Journal([folder], RecordingEngine(log), [states], NUM_CHUNKS, is_new=is_new)


def order_of(log: Log, name: str) -> list[str]:
    """What happened to the states and to a file, in order."""
    file, found = log.file_of(f"zerooffload/rank-00000/{name}"), []
    flushes = {}
    for event in log.events:
        if isinstance(event, Begun):
            found.append("write" if getattr(event.operation, "file", None) == file else "")
        elif isinstance(event, Committed):
            found.append("committed")
        elif isinstance(event, FlushDone):
            found.append(flushes.get(event.number, ""))
        elif hasattr(event, "target"):
            flushes[event.number] = "flush" if event.target == file else ""
    return [item for item in found if item]


def test_a_commit_is_written_and_flushed_before_it_is_told(folder: Path, log: Log, states: OpenFile) -> None:
    made = journal(folder, log, states)
    log.events.clear()
    made.flush_states()
    made.write(record(1))
    assert order_of(log, "states.bin") == ["flush", "committed"]
    assert order_of(log, "record-1.bin") == ["write", "flush", "committed"]
    made.close()
    made.close()


def test_commits_take_turns_and_read_back(folder: Path, log: Log, states: OpenFile, manifest: Manifest) -> None:
    made = journal(folder, log, states)
    made.begin(manifest, record(0))
    assert read_history([folder]).summary == (manifest.run, {0: 0})
    for step in range(1, 6):
        made.write(record(step, {"text": "x" * 10 * step}))
        history = read_history([folder])
        assert history.summary == (manifest.run, {step: step, step - 1: step - 1})
        assert history.problems == ()
    made.give_up_after(4)
    assert read_history([folder]).summary == (manifest.run, {4: 4})
    made.close()


def test_a_longer_state_makes_the_file_longer_and_a_shorter_one_leaves_nothing_of_it(
    folder: Path, log: Log, states: OpenFile, manifest: Manifest
) -> None:
    made = journal(folder, log, states)
    made.begin(manifest, record(0))
    capacity = record_capacity(NUM_CHUNKS)
    made.write(record(1, "x" * capacity))
    assert (folder / "record-1.bin").stat().st_size > capacity
    assert (folder / "record-0.bin").stat().st_size == capacity
    made.write(record(2))
    made.write(record(3, "y"))
    history = read_history([folder])
    assert history.summary == (manifest.run, {3: 3, 2: 2})
    assert history.records[3].state == "y"
    made.close()


@pytest.mark.parametrize("length", [None, 0, 1, 1000, 4096])
def test_a_lost_or_cut_record_is_made_whole_when_it_is_written(
    length: int | None, folder: Path, log: Log, states: OpenFile, manifest: Manifest
) -> None:
    made = journal(folder, log, states)
    made.begin(manifest, record(0))
    made.write(record(1))
    made.close()
    path = folder / "record-0.bin"
    if length is None:
        path.unlink()
    else:
        os.truncate(path, length)
    again = journal(folder, log, states, is_new=False)
    again.write(record(2))
    again.close()
    assert read_history([folder]).summary == (manifest.run, {2: 2, 1: 1})
    # Its name is durable too.
    *_, drive = log.drives()
    assert Image.of(folder.parents[1]).files.keys() == drive.image(lambda _: False).files.keys()


def test_a_continued_journal_leaves_records_as_they_are(
    folder: Path, log: Log, states: OpenFile, manifest: Manifest
) -> None:
    made = journal(folder, log, states)
    made.begin(manifest, record(0))
    made.write(record(1))
    made.close()
    before = Image.of(folder).files
    journal(folder, log, states, is_new=False).close()
    assert Image.of(folder).files == before


def test_a_manifest_is_whole_or_not_there(
    folder: Path, log: Log, states: OpenFile, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = journal(folder, log, states)

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TierIOError) as caught:
        made.begin(manifest, record(0))
    assert caught.value.errno == errno.ENOSPC
    assert not list(folder.glob("*manifest*"))
    made.close()


@pytest.mark.parametrize("operation", ["write", "flush"])
def test_a_failure_is_told_and_the_step_before_is_still_there(
    operation: str, folder: Path, states: OpenFile, manifest: Manifest
) -> None:
    engine = SimulatedEngine(Transfers.EAGER, on_files=True)
    made = Journal([folder], engine, [states], NUM_CHUNKS, is_new=True)
    made.begin(manifest, record(0))
    made.write(record(1))
    engine.fail_next(operation, transferred_bytes=512)
    with pytest.raises(TierIOError, match=r"record-0\.bin"):
        made.write(record(2, "a state of some length" * 100))
    made.close()
    summary = read_history([folder]).summary
    assert summary is not None
    assert 1 in summary[1]


def test_a_journal_that_cannot_be_made_leaves_no_file(
    folder: Path, states: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: OpenFile, _nbytes: int) -> None:
        raise TierIOError("reserve", folder, errno.ENOSPC)

    monkeypatch.setattr("zerooffload.journal.writer.reserve_space", full)
    with pytest.raises(TierIOError):
        Journal([folder], SimulatedEngine(), [states], NUM_CHUNKS, is_new=True)
    assert [path.name for path in folder.iterdir()] == ["states.bin"]


def test_a_forgotten_run_leaves_neither_manifest_nor_records(
    folder: Path, log: Log, states: OpenFile, manifest: Manifest
) -> None:
    made = journal(folder, log, states)
    made.begin(manifest, record(0))
    made.write(record(1))
    made.close()
    forget_run([folder])
    forget_run([folder])
    assert [path.name for path in folder.iterdir()] == ["states.bin"]
    assert read_history([folder]).manifest is None
