"""Tuning a recipe: what is tried, within which bounds, what is kept, what is left."""

from __future__ import annotations

import json
import os
import tomllib
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from zerooffload.config import OffloadConfig
from zerooffload.errors import BudgetError, ConfigError, ZeroOffloadError
from zerooffload.planner.profiles import MachineProfile
from zerooffload.train.planning import Planner
from zerooffload.train.recipe import Recipe, recipe_from
from zerooffload.train.tuning import trial as trial_module
from zerooffload.train.tuning import tune
from zerooffload.train.tuning.halving import num_turns
from zerooffload.train.tuning.trial import Job, Trial, run_trial, take_trial
from zerooffload.train.tuning.tune import Effort, Tuned, Tuning, tuned_recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
HOST_MEMORY = 128 << 20
ON_NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "update": "after_backward"}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Of a recipe, whose states are on nvme."""
    (tmp_path / "nvme").mkdir()
    text = tmp_path / "text.txt"
    text.write_text("All work and no play. " * 100)
    return {
        "model": {"config": LLAMA},
        "data": {"path": str(text)},
        "offload": {**ON_NVME, "nvme_paths": [str(tmp_path / "nvme")], "host_memory": HOST_MEMORY},
        "training": {"steps": 3, "batch_size": 4, "sequence_length": 16},
        "checkpoint": {"directory": str(tmp_path / "checkpoints"), "every_steps": 1},
    }


@pytest.fixture(scope="module")
def planner() -> Planner:
    """One for all tests: what a model asks for is traced once."""
    return Planner()


@pytest.fixture(autouse=True)
def _surroundings(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tune, "Planner", lambda: planner)
    # Such small models are slower on several threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return recipe_from(values)


@pytest.fixture
def machine(tmp_path: Path) -> MachineProfile:
    return MachineProfile.from_mapping(
        {
            "name": "this machine",
            "device": {
                "memory": "4GiB", "shares_host_memory": True, "matmul_flops": {"fp32": 1e10}, "memory_bandwidth": "9GB",
            },
            "host": {"memory": "4GiB", "cores": 4, "memory_bandwidth": "9GB"},
            "drives": [{"path": str(tmp_path / "nvme"), "read": "1GB", "write": "1GB"}],
        }
    )  # fmt: skip


class Machine:
    """Takes trials that only exist here: host memory is fast, and so is what is hidden."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.interrupted_after: int | None = None
        self.refuses: Callable[[OffloadConfig], bool] = lambda _: False
        self.now = 0.0

    def run(self, job: Job, _: str) -> Trial:
        if len(self.jobs) == self.interrupted_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.now += 10.0
        if self.refuses(job.recipe.offload):
            raise BudgetError("it does not fit")
        seconds = self.seconds(job.recipe.offload)
        return Trial(
            step_seconds=[seconds] * job.num_steps,
            bytes_moved={}, planned_bytes={}, peak_bytes={}, baseline_bytes=0, process_peak_bytes=0,
        )  # fmt: skip

    @staticmethod
    def seconds(config: OffloadConfig) -> float:
        slow = {"host": 1.0, "nvme": 2.0}
        homes = sum(slow[str(home)] for home in (config.params, config.optimizer, config.gradients))
        return homes * (1.0 if config.update == "after_backward" else 0.9)

    def tuning(self, recipe: Recipe, machine: MachineProfile, journal: Path, **settings: Any) -> Tuning:
        effort = Effort(**{"num_trials": 5, **settings})
        return Tuning(recipe, machine, journal, effort, run=self.run, clock=lambda: self.now)


@pytest.fixture
def there() -> Machine:
    return Machine()


def summary(tuned: Tuned) -> list[tuple[str, float | None, str]]:
    return [(one.configuration.key, one.seconds, one.refusal) for one in tuned.tried]


def test_the_fastest_that_was_tried_is_kept_and_the_journal_goes(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    tuned = there.tuning(recipe, machine, tmp_path / "journal.json").tune()
    assert there.jobs[0].recipe.offload == recipe.offload
    assert tuned.first.recipe.offload.params == "nvme"
    assert len(tuned.tried) == 5
    seconds = [there.seconds(one.configuration.recipe.offload) for one in tuned.tried]
    assert seconds == sorted(seconds) == [one.seconds for one in tuned.tried]
    assert tuned.best is tuned.tried[0].configuration
    assert there.seconds(tuned.best.recipe.offload) < there.seconds(recipe.offload)
    assert tuned.is_complete
    assert list(tmp_path.glob("*journal*")) == []


def test_trials_keep_to_budgets_and_numbers(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    there.tuning(recipe, machine, tmp_path / "journal.json", num_trials=40).tune()
    tried = {job.recipe.offload.model_dump_json(): job.recipe.offload for job in there.jobs}.values()
    assert len(tried) > 10
    for config in tried:
        assert (config.host_memory, config.moments, config.compute_dtype) == (HOST_MEMORY, "fp32", None)
        assert config.nvme_paths == recipe.offload.nvme_paths
    # Something of each kind was tried.
    assert {config.update for config in tried} == {"after_backward", "under_next_forward", "during_backward"}
    assert {config.threads for config in tried} > {None}
    assert {str(config.params) for config in tried} == {"host", "nvme"}


def test_moments_change_only_where_they_may(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    journal, effort = tmp_path / "journal.json", Effort(num_trials=60)
    Tuning(recipe, machine, journal, effort, may_use_moments=True, run=there.run, clock=lambda: there.now).tune()
    assert {job.recipe.offload.moments for job in there.jobs} == {"fp32", "bf16", "8bit"}


def test_an_interrupted_tuning_keeps_its_best_and_goes_on_where_it_was(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.json"
    whole = there.tuning(recipe, machine, tmp_path / "other.json").tune()
    num_turns = len(there.jobs)
    part = Machine()
    part.interrupted_after = num_turns - 4
    tuned = part.tuning(recipe, machine, journal).tune()
    assert not tuned.is_complete
    assert tuned.best.key == whole.best.key
    assert len(json.loads(journal.read_text())["turns"]) == num_turns - 4
    rest = Machine()
    again = rest.tuning(recipe, machine, journal).tune()
    assert len(rest.jobs) == 4
    assert summary(again) == summary(whole)
    assert not journal.exists()


def test_before_anything_was_tried_an_interrupt_is_one(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    there.interrupted_after = 0
    with pytest.raises(KeyboardInterrupt):
        there.tuning(recipe, machine, tmp_path / "journal.json").tune()
    assert not (tmp_path / "journal.json").exists()


@pytest.mark.parametrize("length", [(20.0, 5), (42.0, 7), (10_000.0, 100)])
def test_where_steps_are_short_more_of_them_count(
    length: tuple[float, int], there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    """The recipe's take 6 seconds here; those of a tuning that was left have the length that they had."""
    journal, (least_seconds, num_steps) = tmp_path / "journal.json", length
    there.interrupted_after = 3
    there.tuning(recipe, machine, journal, least_seconds=least_seconds).tune()
    rest = Machine()
    rest.tuning(recipe, machine, journal, least_seconds=least_seconds).tune()
    *turns, taught, also_taught = [job.num_steps for job in [*there.jobs, *rest.jobs]]
    assert turns[0] == 5
    assert set(turns[1:]) == {num_steps}
    assert (taught, also_taught) == (5, 5)


def test_a_journal_of_another_recipe_is_forgotten(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path, values: dict[str, Any]
) -> None:
    journal = tmp_path / "journal.json"
    there.interrupted_after = 3
    there.tuning(recipe, machine, journal).tune()
    other, longer = Machine(), recipe_from({**values, "training": {**values["training"], "sequence_length": 32}})
    other.tuning(longer, machine, journal).tune()
    fresh = Machine()
    fresh.tuning(longer, machine, tmp_path / "fresh.json").tune()
    assert len(other.jobs) == len(fresh.jobs)


def test_two_at_once_with_one_journal_are_refused(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    journal, parent = tmp_path / "journal.json", psutil.Process(os.getppid())
    journal.write_text(
        json.dumps({"format": 1, "subject": "", "turns": [], "owner": [parent.pid, parent.create_time()]})
    )
    with pytest.raises(ConfigError, match=f"process {parent.pid} is tuning this recipe"):
        there.tuning(recipe, machine, journal)
    # Another process has that number by now.
    journal.write_text(json.dumps({"format": 1, "subject": "", "turns": [], "owner": [parent.pid, 1.0]}))
    there.tuning(recipe, machine, journal)


def test_what_does_not_fit_is_no_candidate(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    there.refuses = lambda config: config.params == "host"
    tuned = there.tuning(recipe, machine, tmp_path / "journal.json").tune()
    refused = [one for one in tuned.tried if one.seconds is None]
    assert refused
    assert all(one.refusal == "it does not fit" for one in refused)
    assert tuned.best.recipe.offload.params == "nvme"


def test_a_recipe_that_does_not_run_is_refused(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    there.refuses = lambda _: True
    with pytest.raises(BudgetError, match="it does not fit"):
        there.tuning(recipe, machine, tmp_path / "journal.json").tune()
    assert len(there.jobs) == 1


@pytest.mark.parametrize("budget", [(1.0, 1), (170.0, 5), (10_000.0, 11)])
def test_time_decides_how_many_are_tried(
    budget: tuple[float, int], there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    """A turn takes 10 seconds here, and two more teach of the machine; one other is tried in any case."""
    most_seconds, num_others = budget
    tuning = there.tuning(recipe, machine, tmp_path / "journal.json", num_trials=12, most_seconds=most_seconds)
    tuning.tune()
    assert len(there.jobs) == num_turns(num_others) + 2


def test_the_best_recipe_can_be_read_and_is_the_run_that_was_measured(
    there: Machine, recipe: Recipe, machine: MachineProfile, tmp_path: Path, values: dict[str, Any]
) -> None:
    tuned = there.tuning(recipe, machine, tmp_path / "journal.json").tune()
    written = tomllib.loads(tuned_recipe(values, tuned.best))
    assert {name: section for name, section in written.items() if name != "offload"} == {
        name: section for name, section in values.items() if name != "offload"
    }
    same = recipe_from(written).offload.model_dump(exclude={"nvme_paths"})
    assert same == tuned.best.recipe.offload.model_dump(exclude={"nvme_paths"})
    assert "nvme_paths" not in written["offload"]


def test_real_trials_keep_to_their_budgets_and_leave_nothing(
    recipe: Recipe, machine: MachineProfile, tmp_path: Path
) -> None:
    trials: list[tuple[OffloadConfig, Trial]] = []

    def run(job: Job, folder_name: str) -> Trial:
        trials.append((job.recipe.offload, run_trial(job, folder_name, take=take_trial)))
        return trials[-1][1]

    run_of_the_recipe = tmp_path / "nvme" / "zerooffload" / "rank-0" / "states"
    run_of_the_recipe.parent.mkdir(parents=True)
    run_of_the_recipe.write_text("a run that is to be resumed")
    effort = Effort(num_trials=2, num_steps=2, num_warm_up=1, least_seconds=0.0)
    tuned = Tuning(recipe, machine, tmp_path / "journal.json", effort, run=run).tune()
    assert tuned.is_complete
    assert len({config.model_dump_json() for config, _ in trials}) >= 2
    for config, trial in trials:
        assert trial.peak_bytes["host"] <= (config.host_memory or 0)
        assert trial.peak_bytes == trial.planned_bytes
        assert len(trial.step_seconds) == 2
    assert trials[-1][1].spans
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert [name for name in left if not name.startswith("cache")] == ["nvme/zerooffload/rank-0/states", "text.txt"]


def test_a_trial_is_a_process_that_leaves_nothing(recipe: Recipe, tmp_path: Path) -> None:
    trial = run_trial(Job(recipe=recipe, num_steps=2, num_warm_up=1, is_traced=True), "trial")
    assert len(trial.step_seconds) == 2
    assert trial.peak_bytes["nvme"] > 0
    assert trial.process_peak_bytes > trial.baseline_bytes > 0
    assert {span.lane.value for span in trial.spans} >= {"compute", "nvme read", "nvme write", "CPU update"}
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("raise ValueError('so it is')", "(?s)ended with code 1.*ValueError: so it is"),
        ("import json; print(json.dumps({'refused': 'RankError', 'message': 'gone'}))", "gone"),
    ],
)
def test_a_trial_that_fails_says_so_and_leaves_nothing(
    program: str, message: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "_PROCESS", ("-c", program))
    with pytest.raises(ZeroOffloadError, match=message):
        run_trial(Job(recipe=recipe, num_steps=1), "trial")
    assert list((tmp_path / "nvme").iterdir()) == []


def test_what_a_trial_refuses_has_its_kind(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import json; print(json.dumps({'refused': 'BudgetError', 'message': 'too large'}))"
    monkeypatch.setattr(trial_module, "_PROCESS", ("-c", program))
    with pytest.raises(BudgetError, match="too large"):
        run_trial(Job(recipe=recipe, num_steps=1), "trial")


def test_an_interrupted_trial_leaves_nothing(recipe: Recipe, tmp_path: Path) -> None:
    def interrupted(job: Job) -> Trial:
        (folder,) = job.recipe.offload.nvme_paths
        (folder / "states").write_text("half of them")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(Job(recipe=recipe, num_steps=1), "trial", take=partial(interrupted))
    assert list((tmp_path / "nvme").iterdir()) == []
