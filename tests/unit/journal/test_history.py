from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from zerooffload import CheckpointError, ConfigError
from zerooffload.journal import Manifest, StepRecord, common_step, read_history
from zerooffload.journal.history import record_path
from zerooffload.tiers import SlotState

if TYPE_CHECKING:
    from pathlib import Path

RUN = bytes(range(16)).hex()
OTHER = bytes(16).hex()


def held(newest: int, previous: int | None, run: str = RUN) -> tuple[str, dict[int, int]]:
    """Sequences are steps here."""
    return run, {step: step for step in (newest, previous) if step is not None}


def test_every_combination_of_two_ranks_whose_commits_are_at_most_one_apart() -> None:
    """The newest step that both hold; what one rank has alone is given up."""
    for newest, behind, one_keeps, other_keeps in itertools.product(range(5), (0, 1), (True, False), (True, False)):
        one, other = newest, newest - behind
        if other < 0:
            continue
        ranks = {
            0: held(one, one - 1 if one_keeps and one else None),
            1: held(other, other - 1 if other_keeps and other else None),
        }
        both = set(ranks[0][1]) & set(ranks[1][1])
        for order in (ranks, dict(reversed(ranks.items()))):
            if one == 0 and other == 0:
                assert common_step(order) is None
            elif not both:
                with pytest.raises(CheckpointError, match="no step in common"):
                    common_step(order)
            else:
                expected = max(both)
                assert common_step(order) == ((RUN, expected, expected) if expected else None)


def test_three_ranks_go_on_from_what_the_last_one_has() -> None:
    ranks = {0: held(4, 3), 1: held(3, 2), 2: held(4, 3)}
    assert common_step(ranks) == (RUN, 3, 3)
    assert common_step({**ranks, 2: held(3, None)}) == (RUN, 3, 3)


def test_steps_are_not_sequences() -> None:
    assert common_step({0: (RUN, {7: 3, 8: 4}), 1: (RUN, {7: 3, 6: 2})}) == (RUN, 7, 3)


def test_nothing_is_held() -> None:
    assert common_step({0: None}) is None
    assert common_step({0: None, 1: None}) is None
    assert common_step({0: held(0, None), 1: None}) is None
    assert common_step({0: held(0, None), 1: held(0, None, OTHER)}) is None


@pytest.mark.parametrize("behind", [held(0, None), held(2, 1)])
def test_a_rank_without_its_files_is_asked_for_them(behind: tuple[str, dict[int, int]]) -> None:
    with pytest.raises(ConfigError, match="rank 0 holds the files of a run, rank 1 does not"):
        common_step({0: held(2, 1), 1: None})
    with pytest.raises(ConfigError, match="rank 1 holds the files of a run, rank 0 does not"):
        common_step({0: None, 1: held(2, 1), 2: behind})


def test_ranks_with_different_runs() -> None:
    for other in (held(2, 1, OTHER), held(0, None, OTHER)):
        with pytest.raises(ConfigError, match="different runs"):
            common_step({0: held(2, 1), 1: other})


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    return paths


def write_record(folder: Path, sequence: int, step: int, *, run: str = RUN, num_chunks: int = 4) -> None:
    chunks = SlotState(np.zeros(num_chunks, np.uint8), np.zeros(num_chunks, np.uint64))
    content = StepRecord(bytes.fromhex(run), sequence, step, chunks, {}).encode()
    record_path(folder, sequence).write_bytes(content + bytes(100))


def write_manifest(folder: Path, manifest: Manifest, path: int = 0) -> None:
    (folder / "manifest.json").write_bytes(replace(manifest, num_paths=2, path=path).encode())


def test_a_run_on_two_paths_in_any_order(folders: list[Path], manifest: Manifest) -> None:
    for index, folder in enumerate(folders):
        write_manifest(folder, manifest, index)
    write_record(folders[0], 3, 3)
    write_record(folders[0], 2, 2)
    for order in ((0, 1), (1, 0)):
        history = read_history([folders[index] for index in order])
        assert history.order == order
        assert history.summary == (RUN, {3: 3, 2: 2})
        assert history.problems == ()


def test_problems_are_told_and_the_other_record_counts(folders: list[Path], manifest: Manifest) -> None:
    folder = folders[0]
    (folder / "manifest.json").write_bytes(manifest.encode())
    write_record(folder, 2, 2)
    for spoil, words in (
        (lambda path: path.write_bytes(b"x" * 200), "does not begin like one"),
        (lambda path: path.write_bytes(b""), "0 bytes"),
        (lambda path: path.unlink(), "cannot read"),
        (lambda _: write_record(folder, 3, 3, run=OTHER), "another run"),
        (lambda _: write_record(folder, 3, 3, num_chunks=5), "names 5 chunks, the manifest 4"),
        (lambda path: path.write_bytes(record_path(folder, 2).read_bytes()), "another run"),
    ):
        write_record(folder, 3, 3)
        spoil(record_path(folder, 3))
        history = read_history([folder])
        assert history.summary == (RUN, {2: 2})
        (problem,) = history.problems
        assert words in problem
        assert "record-1.bin" in problem


def test_a_record_of_zeros_was_never_used(folders: list[Path], manifest: Manifest) -> None:
    (folders[0] / "manifest.json").write_bytes(manifest.encode())
    write_record(folders[0], 0, 0)
    record_path(folders[0], 1).write_bytes(bytes(4096))
    history = read_history(folders[:1])
    assert (history.summary, history.problems) == ((RUN, {0: 0}), ())
    record_path(folders[0], 0).write_bytes(bytes(4096))
    with pytest.raises(CheckpointError, match="no step of the run can be read"):
        read_history(folders[:1])


def test_paths_that_do_not_belong_together(folders: list[Path], manifest: Manifest) -> None:
    write_record(folders[0], 1, 1)
    write_manifest(folders[0], manifest, 0)
    with pytest.raises(CheckpointError, match=r"b has no files of the run that is in .*a: name the paths"):
        read_history(folders)
    with pytest.raises(CheckpointError, match="has 2 paths: name each of them once"):
        read_history(folders[:1])
    write_manifest(folders[1], manifest, 0)
    with pytest.raises(CheckpointError, match="has 2 paths: name each of them once"):
        read_history(folders)
    write_manifest(folders[1], replace(manifest, run=OTHER), 1)
    with pytest.raises(CheckpointError, match="different runs"):
        read_history(folders)


def test_without_any_manifest_there_is_no_run_unless_a_step_was_committed(folders: list[Path]) -> None:
    assert read_history(folders).manifest is None
    write_record(folders[0], 0, 0)
    assert read_history(folders).manifest is None
    write_record(folders[0], 1, 1)
    with pytest.raises(CheckpointError, match=r"holds step 1 of a run, but .*manifest\.json is not there"):
        read_history(folders)


def test_with_some_manifests_there_is_no_run_if_none_was_committed(folders: list[Path], manifest: Manifest) -> None:
    write_manifest(folders[1], manifest, 1)
    write_record(folders[0], 0, 0, run=OTHER)
    with pytest.raises(CheckpointError, match="a has no files of the run"):
        read_history(folders)
    write_record(folders[0], 0, 0)
    assert read_history(folders).manifest is None
    write_record(folders[0], 1, 1)
    with pytest.raises(CheckpointError, match="a has no files of the run"):
        read_history(folders)
