"""`zerooffload doctor --verify` and `zerooffload resume` on what a run left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from zerooffload.cli import app
from zerooffload.tiers import RunDirectory

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")

Run = "Callable[..., tuple[int, str, str]]"


@pytest.fixture
def left(run: Run, recipe_file: Path, nvme: Path) -> Path:
    """An nvme path in which a run of two steps was left."""
    settings = ["offload.params=nvme", "offload.optimizer=nvme", f'offload.nvme_paths=["{nvme}"]', "training.steps=2"]
    code, _, err = run("train", recipe_file, *(part for setting in settings for part in ("--set", setting)))
    assert code == 0, err
    return nvme


def test_a_whole_run_is_compared_and_found_whole(run: Run, left: Path) -> None:
    code, out, err = run("doctor", "--verify", left, "--json")
    assert (code, err) == (0, "")
    (finding,) = json.loads(out)["findings"]
    assert finding["subject"] == f"run in {left}, rank 0"
    assert finding["value"].startswith("step 2: ")


def test_a_flipped_bit_is_named(run: Run, left: Path) -> None:
    states = left / "zerooffload" / "rank-00000" / "states.bin"
    content = bytearray(states.read_bytes())
    # In every page, so in every slot of every chunk.
    for offset in range(0, len(content), 4096):
        content[offset] ^= 1
    states.write_bytes(content)
    code, out, _ = run("doctor", "--verify", left, "--json")
    assert code == app.EXIT_FOUND_PROBLEM
    problems = [finding for finding in json.loads(out)["findings"] if finding["verdict"] == "problem"]
    assert all(str(states) in finding["value"] for finding in problems[:-1])
    assert "is not what was written" in problems[0]["value"]
    code, _, err = run("resume", left, "--set", "training.steps=3")
    assert code == app.EXIT_USER_ERROR
    assert "checksum" in err
    assert str(states) in err


def test_a_run_in_use_is_left_alone(run: Run, left: Path) -> None:
    held = RunDirectory(left)
    code, out, _ = run("doctor", "--verify", left, "--json")
    assert code == app.EXIT_FOUND_PROBLEM
    assert "in use by another run" in out
    held.close()
    assert run("doctor", "--verify", left)[0] == 0


def test_an_empty_folder_is_a_note(run: Run, nvme: Path) -> None:
    code, out, _ = run("doctor", "--verify", nvme)
    assert code == 0
    assert "none" in out
    assert list(nvme.iterdir()) == []


def test_resume_goes_on_and_tells_the_wear(run: Run, left: Path) -> None:
    code, out, err = run("resume", left, "--set", "training.steps=4", "--drive-endurance-tbw", "600")
    assert code == 0, err
    assert "going on behind step 2" in out
    assert "drives of 600 TBW last" in " ".join(out.split())


def test_resume_without_a_run_says_so(run: Run, nvme: Path) -> None:
    code, _, err = run("resume", nvme)
    assert code == app.EXIT_USER_ERROR
    assert "holds no run that finished a step" in err
