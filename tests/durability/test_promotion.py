"""What a run committed on its nvme paths is made a checkpoint, without the run and without harm to it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.durable_training import (
    ALL_ON_NVME,
    Moment,
    Scenario,
    in_turns,
    of_rank,
    real_environment,
    training,
)
from support.rank_turns import TurnCollectives, Turns

import zerooffload as zo
from zerooffload.aio import OpenFile
from zerooffload.aio.cloning import clone_range
from zerooffload.aio.files import create_file, open_file
from zerooffload.checkpoint.manifest import read_manifests
from zerooffload.tiers import RunDirectory

pytestmark = pytest.mark.usefixtures("small_chunks")

HOSTED: dict[str, Any] = {"params": "host", "optimizer": "host"}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 with 8-bit moments": {"compute_dtype": "bf16", "moments": "8bit"},
    "fp16 with bf16 moments": {"compute_dtype": "fp16", "moments": "bf16"},
    "two paths": {},
}


@pytest.fixture(autouse=True)
def _whole_pages_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerooffload.checkpoint.page_writer.LEAST_IN_PLACE_BYTES", 4096)


def scenario(form: str = "fp32", **fields: Any) -> Scenario:
    return Scenario(
        num_batches=4,
        width=72,
        overflows=(1,) if form.startswith("fp16") else (),
        num_paths=2 if form == "two paths" else 1,
        config={**ALL_ON_NVME, **FORMS[form], **fields},
    )


def train(kept: Scenario, scratch: Path) -> tuple[list[Path], Moment]:
    """Two steps in `a`, which are also saved in `saved`; the nvme paths."""
    with training(kept, scratch / "a", real_environment()) as run:
        run.one_batch()
        run.one_batch()
        zo.save(scratch / "saved", run.model, run.optimizer)
        return kept.paths(scratch / "a"), run.moment()


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file, by its path; not of locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_save(folder: Path) -> list[dict[str, Any]]:
    """The manifests, but for what tells saves apart."""
    return [{**asdict(manifest), "save": ""} for manifest in read_manifests(folder)]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_what_a_save_would_have_been_and_the_run_stays(form: str, scratch: Path) -> None:
    paths, moment = train(scenario(form), scratch)
    before = contents(scratch / "a")
    promoted = zo.promote(paths, scratch / "promoted")
    assert contents(scratch / "a") == before
    (saved,) = (scratch / "saved").iterdir()
    assert promoted.name == saved.name
    assert without_save(promoted) == without_save(saved)
    found, expected = (contents(folder) for folder in (promoted, saved))
    assert {name for name in found if found[name] != expected[name]} == {"rank-00000.json"}
    assert found.keys() == expected.keys()
    with training(scenario(form, **HOSTED), scratch / "b", real_environment()) as run:
        assert zo.load(scratch / "promoted", run.model, run.optimizer) is None
        run.num_steps = moment.values["num_steps"]
        assert run.moment().differences(moment) == []
        losses = run.finish()
    with training(scenario(form), scratch / "a", real_environment()) as run:
        assert run.resume() == moment.values["num_steps"]
        assert run.finish() == losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(stage: int, scratch: Path) -> None:
    ranks = scenario(stage=stage)

    def train_rank(rank: int, turns: Turns) -> Moment:
        with training(ranks, scratch / "a", of_rank(real_environment(), turns, TurnCollectives(turns, rank))) as run:
            run.one_batch()
            run.one_batch()
            return run.moment()

    moments = in_turns(2, train_rank)
    before = contents(scratch / "a")
    promoted = zo.promote(ranks.paths(scratch / "a"), scratch / "promoted")
    assert contents(scratch / "a") == before
    assert [manifest.num_ranks for manifest in read_manifests(promoted)] == [2, 2]
    with training(scenario(**HOSTED), scratch / "b", real_environment()) as run:
        zo.load(promoted, run.model, run.optimizer)
        run.num_steps = 2
        assert run.moment().differences(moments[0]) == []
    (path,) = ranks.paths(scratch / "a")
    (path / "zerooffload" / "rank-00001").rename(path / "elsewhere")
    with pytest.raises(zo.ConfigError, match="the run has 2 ranks, here are the directories of 0:"):
        zo.promote(path, scratch / "promoted")


def nothing_there(_: Path) -> None:
    return


def nothing_committed(scratch: Path) -> None:
    with training(scenario(), scratch / "a", real_environment()):
        pass


def frozen_in_memory(scratch: Path) -> None:
    train(scenario(**HOSTED, durable=True), scratch)


def changed_chunk(scratch: Path) -> None:
    paths, _ = train(scenario(), scratch)
    path = paths[0] / "zerooffload" / "rank-00000" / "states.bin"
    content = bytearray(path.read_bytes())
    # Somewhere in each slot of each chunk.
    content[::1024] = bytes(byte ^ 1 for byte in content[::1024])
    path.write_bytes(content)


def lost_states(scratch: Path) -> None:
    paths, _ = train(scenario(), scratch)
    (paths[0] / "zerooffload" / "rank-00000" / "states.bin").unlink()


REFUSALS: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "nothing there": (nothing_there, zo.CheckpointError, "no run that finished a step"),
    "nothing committed": (nothing_committed, zo.CheckpointError, "no run that finished a step"),
    "frozen in memory": (frozen_in_memory, zo.ConfigError, "keeps no copy of shift"),
    "a changed chunk": (
        changed_chunk,
        zo.CheckpointError,
        r"states\.bin.*The checksum is not that of what was written",
    ),
    "lost states": (lost_states, zo.TierIOError, r"states\.bin"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_cannot_be_promoted_leaves_nothing(reason: str, scratch: Path) -> None:
    prepare, error, message = REFUSALS[reason]
    (path,) = scenario().paths(scratch / "a")
    prepare(scratch)
    before = contents(scratch / "a")
    with pytest.raises(error, match=message):
        zo.promote(path, scratch / "promoted")
    assert contents(scratch / "a") == before
    assert not (scratch / "promoted").exists() or list((scratch / "promoted").iterdir()) == []


def test_a_run_that_is_under_way_is_refused(scratch: Path) -> None:
    (path,) = scenario().paths(scratch / "a")
    with training(scenario(), scratch / "a", real_environment()) as run:
        run.one_batch()
        with pytest.raises(zo.ConfigError, match="in use by another run"):
            zo.promote(path, scratch / "promoted")


def test_killed_half_way_it_leaves_no_checkpoint_and_the_run(scratch: Path) -> None:
    (path,), moment = train(scenario(), scratch)
    before = contents(scratch / "a")
    lines = f"""
import os, signal, zerooffload as zo
from zerooffload.checkpoint.shard_writer import ShardWriter
ShardWriter.finish = lambda writer: os.kill(os.getpid(), signal.SIGKILL)
zo.promote({str(path)!r}, {str(scratch / "promoted")!r})
"""
    ended = subprocess.run([sys.executable, "-P", "-c", lines], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert contents(scratch / "a") == before
    assert [name.name for name in (scratch / "promoted").iterdir()] == [".save-00000001-step-00000002.part"]
    promoted = zo.promote(path, scratch / "promoted")
    assert list((scratch / "promoted").iterdir()) == [promoted]
    with training(scenario(**HOSTED), scratch / "b", real_environment()) as run:
        zo.load(promoted, run.model, run.optimizer)
        run.num_steps = 2
        assert run.moment().differences(moment) == []


def test_where_blocks_can_be_shared_whole_pages_are_not_written(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system's part is played by a copy."""
    shared = []

    def clone(source: OpenFile, source_offset: int, target: OpenFile, offset: int, nbytes: int) -> bool:
        assert not any(value % 4096 for value in (source_offset, offset, nbytes))
        with source.path.open("rb") as file:
            content = os.pread(file.fileno(), nbytes, source_offset)
        with target.path.open("r+b") as file:
            os.pwrite(file.fileno(), content, offset)
        shared.append(nbytes)
        return True

    wide = {"width": 128}
    (path,), moment = train(replace(scenario(), **wide), scratch)
    monkeypatch.setattr("zerooffload.checkpoint.page_writer.clone_range", clone)
    promoted = zo.promote(path, scratch / "promoted")
    # Of three states: the embedding, and the first block but for its last 128 elements. The second block's bytes do not
    # begin with a page of the files.
    assert sum(shared) == 3 * 4 * (32 * 128 + 128 * 128)
    with training(replace(scenario(**HOSTED), **wide), scratch / "b", real_environment()) as run:
        zo.load(promoted, run.model, run.optimizer)
        run.num_steps = 2
        assert run.moment().differences(moment) == []


def test_what_the_kernel_is_asked_for(tmp_path: Path) -> None:
    """On a file system that cannot, nothing changes; where it can, the bytes are there."""
    (tmp_path / "source").write_bytes(b"a" * 4096 + b"b" * 4096)
    (tmp_path / "target").write_bytes(b"c" * 8192)
    source, target = open_file(tmp_path / "source"), open_file(tmp_path / "target")
    try:
        can_share = clone_range(source, 4096, target, 0, 4096)
    finally:
        source.close()
        target.close()
    assert (tmp_path / "target").read_bytes() == (b"b" if can_share else b"c") * 4096 + b"c" * 4096
    if not can_share:
        pytest.skip("the file system of the tests cannot share blocks: what was seen is that it refuses")


def test_the_request_is_that_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`struct file_clone_range`: descriptor, offset and length of the source, and where it goes; FICLONERANGE."""
    asked = []
    monkeypatch.setattr(
        "zerooffload.aio.cloning.fcntl.ioctl", lambda fd, request, content: asked.append((fd, request, content))
    )
    source, target = create_file(tmp_path / "source"), create_file(tmp_path / "target")
    try:
        assert clone_range(source, 1 << 33, target, 1 << 34, 4096)
        numbers = (source.fd, 1 << 33, 4096, 1 << 34)
        expected = b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)
        assert asked == [(target.fd, 0x4020940D, expected)]
    finally:
        source.close()
        target.close()


def test_the_directories_are_free_afterwards(scratch: Path) -> None:
    (path,), _ = train(scenario(), scratch)
    zo.promote(path, scratch / "promoted")
    RunDirectory(path, 0).close()
