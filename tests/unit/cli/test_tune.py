"""`zerooffload tune`: what it writes and says. What it tries is in tests/unit/train/test_tuning.py."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from zerooffload.cli import tune as command
from zerooffload.planner.profiles import find_machine, read_machine, write_machine
from zerooffload.telemetry import Lane, Span
from zerooffload.train.planning import Planner
from zerooffload.train.recipe import read_recipe
from zerooffload.train.tuning import tune
from zerooffload.train.tuning.trial import Job, Trial
from zerooffload.train.tuning.tune import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("transformers")

RECIPE = """
[model.config]
model_type = "llama"
vocab_size = 257
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1

[data]
path = "none"

[offload]
host_memory = "1GiB"
update = "after_backward"

[training]
steps = 100
batch_size = 2
sequence_length = 16
"""
MACHINE = """
name = "this machine"
[device]
memory = "4GiB"
shares_host_memory = true
matmul_flops = { fp32 = 1e7 }
memory_bandwidth = "9GB"
[host]
memory = "4GiB"
cores = 4
memory_bandwidth = "9GB"
"""
COMPUTE_TOOK = 1.5


@pytest.fixture(scope="module")
def planner() -> Planner:
    """One for all tests: what a model asks for is traced once."""
    return Planner()


class Trials:
    """Half a second a step where threads are given, one otherwise."""

    interrupt_after: int | None = None

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self, job: Job, _: str) -> Trial:
        if self.num_taken == self.interrupt_after:
            raise KeyboardInterrupt
        self.num_taken += 1
        seconds = 1.0 if job.recipe.offload.threads is None else 0.5
        spans = [Span(Lane.COMPUTE, "forward", 0.0, COMPUTE_TOOK)] if job.is_traced else []
        return Trial(
            step_seconds=[seconds], spans=spans,
            bytes_moved={}, planned_bytes={}, peak_bytes={}, baseline_bytes=0, process_peak_bytes=0,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch, planner: Planner, tmp_path: Path) -> Trials:
    found = Trials()
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "Planner", lambda: planner)
    monkeypatch.setattr(command, "Tuning", partial(Tuning, run=found.take))
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    (tmp_path / "machine.toml").write_text(MACHINE)
    write_machine(tmp_path / "machine.json", read_machine(tmp_path / "machine.toml"))
    return file


def test_the_best_is_written_with_what_was_learned(recipe: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    machine = recipe.with_name("machine.json")
    code, out, err = run("tune", str(recipe), "--machine", str(machine), "--set", "training.batch_size=4")
    assert code == 0, err
    best = read_recipe(recipe.with_name("recipe.tuned.toml"))
    assert best.offload.threads is not None
    assert (best.offload.host_memory, best.training.batch_size, best.training.steps) == (1 << 30, 4, 100)
    assert "the fastest takes 50% of the time of the recipe's own settings" in out
    assert "as the recipe has it" in out
    learned = read_machine(machine)
    assert 0.25 <= learned.corrections["compute"] <= 4
    assert learned.model_copy(update={"corrections": {}}) == read_machine(machine.with_suffix(".toml"))
    assert f"compute x {learned.corrections['compute']:.2f}" in out
    assert sorted(file.name for file in recipe.parent.glob("*.json")) == ["machine.json"]


def test_as_json(recipe: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    output = recipe.with_name("best.toml")
    machine = recipe.with_name("machine.json")
    code, out, _ = run(
        "tune", str(recipe), "--machine", str(machine), "--output", str(output), "--json", "--trials", "4"
    )
    told = json.loads(out)
    assert code == 0
    assert told["recipe"] == str(output)
    assert told["is_complete"]
    assert told["best"]["part_of_the_recipes"] == 0.5
    assert [row["seconds"] for row in told["tried"]] == sorted(row["seconds"] for row in told["tried"])
    assert len(told["tried"]) <= 4
    assert told["best"]["changes"].keys() >= {"threads"}


def test_a_profile_by_hand_stays_as_it_is(recipe: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    machine = recipe.with_name("hand.toml")
    machine.write_text(MACHINE)
    assert run("tune", str(recipe), "--machine", str(machine), "--trials", "2")[0] == 0
    assert machine.read_text() == MACHINE
    assert read_machine(machine.with_suffix(".json")).corrections


def test_interrupted_it_writes_the_best_so_far_and_can_go_on(
    recipe: Path, run: Callable[..., tuple[int, str, str]], trials: Trials
) -> None:
    words = ("tune", str(recipe), "--machine", str(recipe.with_name("machine.json")), "--trials", "2")
    trials.interrupt_after = 7
    code, out, err = run(*words)
    assert code == 130
    assert "written to" in out
    assert "recipe.tuned.toml.trials.json: the same command goes on" in err.replace("\n", "")
    assert "ended cleanly" in err
    read_recipe(recipe.with_name("recipe.tuned.toml"))
    trials.interrupt_after = None
    assert run(*words)[0] == 0
    # Ten turns, and two that teach of the machine.
    assert trials.num_taken == 12
    assert not list(recipe.parent.glob("*trials.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "best.json"], "name a file that ends in .toml"),
        (["--output", "nowhere/best.toml"], "in a folder"),
        (["--output", "{recipe}"], "is the recipe itself"),
        (["--machine", "nothing.json"], "cannot read the machine profile"),
        (["--set", "offload.host_memory=1KiB"], "does not fit the host budget"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_tried(
    words: list[str], message: str, recipe: Path, run: Callable[..., tuple[int, str, str]], trials: Trials
) -> None:
    machine = [] if "--machine" in words else ["--machine", str(recipe.with_name("machine.json"))]
    code, _, err = run("tune", str(recipe), *machine, *(word.format(recipe=recipe) for word in words))
    assert code == 2
    assert message in err
    assert trials.num_taken == 0


def test_another_machines_profile_is_refused(recipe: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    file = recipe.with_name("theirs.json")
    write_machine(file, find_machine("rtx4090").model_copy(update={"identity": {"cpu": "another"}}))
    code, _, err = run("tune", str(recipe), "--machine", str(file))
    assert code == 2
    assert "is of another machine" in err


def test_without_a_profile_calibrating_is_advised(recipe: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("tune", str(recipe))
    assert code == 2
    assert "run zerooffload calibrate" in err


def test_under_torchrun_it_is_refused(
    recipe: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("tune", str(recipe))
    assert code == 2
    assert "start it without torchrun" in err
