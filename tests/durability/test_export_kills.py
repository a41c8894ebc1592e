"""An export that is killed leaves what was there before, and nothing that looks like a model."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch
from support.exporting import export, export_until_killed
from support.ranks import started_ranks
from support.small_models import small_llama
from support.stored_weights import read_weights

if TYPE_CHECKING:
    from pathlib import Path

MOMENTS = [("mkdir", 1), ("pwrite", 1), ("pwrite", 20), ("fsync", 1), ("fsync", 9), ("rename", 1)]
CASES = [*((*moment, had_one) for moment in MOMENTS for had_one in (False, True)), ("rename", 2, True)]
"""There is a second rename only where an old folder goes."""
OLD_SEED, NEW_SEED = 3, 7


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def holds(folder: Path, seed: int) -> bool:
    expected, found = small_llama(seed=seed).state_dict(), read_weights(folder)
    return found.keys() == expected.keys() - {"lm_head.weight"} and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


@pytest.mark.parametrize(("call", "number", "had_one"), CASES)
def test_a_killed_export_is_taken_for_none(call: str, number: int, tmp_path: Path, *, had_one: bool) -> None:
    if had_one:
        export(str(tmp_path), OLD_SEED)
    with started_ranks(export_until_killed, 1, str(tmp_path), NEW_SEED, call, number) as ranks:
        assert all(ending.died for _, ending in ranks.endings(60.0))
        ranks.processes[0].join()
        assert ranks.processes[0].exitcode == -signal.SIGKILL
    if (call, number) == ("rename", 2):
        assert visible(tmp_path) == []
        assert holds(tmp_path / ".out.replaced", OLD_SEED)
    elif had_one:
        assert holds(tmp_path / "out", OLD_SEED)
    else:
        assert visible(tmp_path) == []
    export(str(tmp_path), NEW_SEED)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert holds(tmp_path / "out", NEW_SEED)
