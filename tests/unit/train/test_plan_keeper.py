"""Runs that are followed by a keeper, on a machine that is all paper: its steps take what their prediction says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import cycle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.paper_runs import PLANNER, done_step, paper_recipe, run_on_paper, with_slower_drives

from zerooffload.config import UpdateMode
from zerooffload.entry.runs import run_of
from zerooffload.planner.drift import REFERENCE_STEPS, WINDOW_STEPS
from zerooffload.runtime.update_mode import ModeChooser
from zerooffload.telemetry import StepReport
from zerooffload.train import plan_keeper, train
from zerooffload.train.keeper import HeldRun, Keeper
from zerooffload.train.loop import Observer, StepRecord, TrainingResult
from zerooffload.train.plan_keeper import NUM_COLD_STEPS, PlanKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import nn

    from zerooffload.train.recipe import Recipe

pytest.importorskip("transformers")

ALL = ("params", "optimizer", "gradients")
NOISE = (1.0, 1.02, 0.99, 1.03, 0.97)
UNTIL_FOUND = 3 * WINDOW_STEPS
UNTIL_JUDGED = NUM_COLD_STEPS + REFERENCE_STEPS


@dataclass
class Rig:
    """A run, and what its keeper says.

    Attributes
    ----------
    host_memory : str
    wanted : UpdateMode or "auto"
    mode_matters : bool
        Whether another mode changes what steps take.
    """

    host_memory: str = "512MiB"
    wanted: Any = "auto"
    mode_matters: bool = True
    num_ranks: int = 1
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paper = run_on_paper(self.host_memory, *ALL)
        homes = dict.fromkeys(ALL, "nvme")
        result = TrainingResult(recipe=paper_recipe(**homes, host_memory=self.host_memory), computes_on_host=False)
        self.chooser = ModeChooser(self.wanted, uses_other_resources=True)
        self.paper = self.paper.updating(self.chooser.mode)
        self.held = HeldRun(estimate=self.paper.estimate())
        run: Any = SimpleNamespace(update_mode=self.chooser, collectives=SimpleNamespace(world_size=self.num_ranks))
        self.followed = plan_keeper._FollowedRun(self.paper, self.held, result, run, PLANNER)
        self._noise = cycle(NOISE)
        self._number = 0
        self._reports: dict[tuple[float, UpdateMode, float], StepReport] = {}

    def steps(self, number: int, *, slower: float = 1.0, was_saving: bool = False) -> list[str]:
        """So many more steps, on drives that are so much slower than their profile; what was said of them."""
        said: list[str] = []
        for _ in range(number):
            # What is said of a step may change the next one.
            said += self.feed(self.reports(1, slower=slower), was_saving=was_saving)
        return said

    def reports(self, number: int, *, slower: float = 1.0) -> list[StepReport]:
        """Of so many steps as the run would do them now."""
        mode = self.chooser.mode if self.mode_matters else self.paper.kind.schedule
        return [self._report(slower, mode, next(self._noise)) for _ in range(number)]

    def feed(self, reports: Iterable[StepReport], *, was_saving: bool = False) -> list[str]:
        """Let the keeper see these; what it says."""
        before = len(self.said)
        for report in reports:
            self._number += 1
            record = StepRecord(
                step=self._number,
                loss=1.0,
                lr=1e-3,
                grad_norm=0.5,
                seconds=report.seconds,
                tokens=1,
                report=replace(report, step=self._number),
                was_saving=was_saving,
            )
            self.said += self.followed.finished(record)
        return self.said[before:]

    def _report(self, slower: float, mode: UpdateMode, times: float) -> StepReport:
        key = (slower, mode, times)
        if key not in self._reports:
            truth = with_slower_drives(self.paper, slower) if slower != 1.0 else self.paper
            self._reports[key] = done_step(truth.updating(mode), times=times)
        return self._reports[key]


def test_the_third_step_is_compared_and_what_goes_on_like_it_is_not_worth_a_word() -> None:
    rig = Rig()
    assert rig.steps(NUM_COLD_STEPS) == []
    (line,) = rig.steps(1)
    assert line.startswith("step 3 is as predicted: memory, bytes, and ")
    assert rig.held.probe_step == 3
    assert {"host, leased", "nvme read", "step", "drive, busy"} <= {each.name for each in rig.held.comparisons}
    assert rig.steps(200) == []
    assert rig.held.notes == []


def test_each_difference_is_a_line() -> None:
    rig = Rig()
    rig.steps(NUM_COLD_STEPS)
    first, *others = rig.steps(1, slower=2.0)
    assert first == "step 3 is not as predicted:"
    assert [line.strip().split(":")[0] for line in others] == ["step", "drive, busy"]


def test_a_drive_that_slows_is_told_once_and_updates_run_when_they_read_least_then() -> None:
    """Going there and back, an update finds in host memory what the one before ended with."""
    rig = Rig()
    rig.steps(60)
    told, switched, _ = rig.steps(UNTIL_FOUND, slower=10.0)
    assert "for the same bytes the drive takes" in told
    assert "times as long: it may be full, throttled, or used by others" in told
    assert "updates run after backward from now on, predicted " in switched
    assert switched.endswith("a step; the numbers are the same")
    assert rig.chooser.mode is UpdateMode.AFTER_BACKWARD
    (judged,) = rig.steps(UNTIL_JUDGED, slower=10.0)
    assert "that has helped: " in judged
    assert rig.steps(200, slower=10.0) == []
    assert [step for step, _ in rig.held.notes] == [int(text.split()[1].rstrip(":")) for text in rig.said[1:]]


def test_a_drive_that_recovers_is_told_and_updates_are_hidden_again() -> None:
    rig = Rig(host_memory="1GiB")
    rig.steps(60)
    rig.chooser.aim_at(UpdateMode.AFTER_BACKWARD)
    rig.followed._on_paper = rig.paper.updating(UpdateMode.AFTER_BACKWARD)
    rig.steps(UNTIL_FOUND + 60, slower=10.0)
    texts = rig.steps(UNTIL_FOUND, slower=1.0)
    assert "the drive takes 0.1" in texts[0]
    assert any("updates run during backward from now on" in text for text in texts)
    assert rig.chooser.mode is UpdateMode.DURING_BACKWARD


def test_a_switch_that_does_not_help_is_taken_back() -> None:
    rig = Rig(mode_matters=False)
    rig.steps(60)
    rig.steps(UNTIL_FOUND, slower=10.0)
    assert rig.chooser.mode is UpdateMode.AFTER_BACKWARD
    (judged,) = rig.steps(UNTIL_JUDGED, slower=10.2)
    assert "that has not helped: " in judged
    assert judged.endswith("updates run during backward again")
    assert rig.chooser.mode is UpdateMode.DURING_BACKWARD
    assert rig.steps(100, slower=10.2) == []


@pytest.mark.parametrize(("wanted", "num_ranks"), [(UpdateMode.DURING_BACKWARD, 1), ("auto", 2)])
def test_what_the_user_has_chosen_and_what_ranks_share_is_not_changed(wanted: Any, num_ranks: int) -> None:
    rig = Rig(wanted=wanted, num_ranks=num_ranks)
    rig.steps(60)
    texts = rig.steps(UNTIL_FOUND, slower=10.0)
    assert any("with updates after backward steps would be shorter, predicted " in text for text in texts)
    assert rig.chooser.mode is UpdateMode.DURING_BACKWARD
    assert rig.steps(100, slower=10.0) == []


def test_homes_that_a_plan_would_choose_now_are_told_with_their_gain() -> None:
    """Once: when the drive recovers they are the same still."""
    rig = Rig(host_memory="4GiB")
    rig.steps(60)
    told, homes = rig.steps(UNTIL_FOUND, slower=10.0)
    assert "the drive takes" in told
    assert re.search(r"zerooffload plan would now choose params of \d of 7 units on (host|device), ", homes)
    assert "a step, predicted. To move them, go on from a checkpoint: zerooffload resume CHECKPOINT " in homes
    assert len(rig.steps(200)) == 1


def test_slower_steps_are_told_with_the_resource_that_changed() -> None:
    """Or without one."""
    rig = Rig()
    rig.steps(60)
    slow = [replace(step, seconds=2 * step.seconds) for step in rig.reports(UNTIL_FOUND)]
    (told, *_) = rig.feed(slow)
    assert told.endswith("before; no resource that is measured accounts for it")
    rig = Rig()
    rig.steps(60)
    kernels = [{**step.hidden_work, "update kernel": 9 * step.hidden_work["update kernel"]} for step in rig.reports(3)]
    slow = [replace(step, seconds=2 * step.seconds, hidden_work=kernels[0]) for step in rig.reports(UNTIL_FOUND)]
    (told, *_) = rig.feed(slow)
    assert "the update's kernel takes " in told
    assert told.endswith("times as long: other programs may use the cores or the memory")


def test_steps_beside_a_checkpoint_are_left_out() -> None:
    rig = Rig()
    rig.steps(NUM_COLD_STEPS)
    assert rig.steps(100, slower=10.0, was_saving=True) == []
    assert rig.held.probe_step is None
    assert len(rig.steps(1)) == 1


def test_that_clipping_ends_what_goes_ahead_is_the_cause_where_it_is() -> None:
    rig = Rig()
    rig.steps(60)
    for _ in range(4):
        rig.chooser.stepped(clipped=True)
    told = rig.steps(UNTIL_FOUND, slower=10.0)[0]
    assert "updates run under next forward now, as steps clip more often or less" in told


class Heard(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noticed(self, text: str) -> None:
        self.lines.append(text)


def trained(recipe: Recipe) -> tuple[TrainingResult, list[str]]:
    heard = Heard()
    return train(recipe, heard, keeper=PlanKeeper()), heard.lines


@pytest.fixture
def remembered(cache: Path) -> Path:
    """The file of this machine's profile, as a slow machine without an identity: written by hand."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / "machine.json"
    file.write_text(
        """{"name": "this one", "device": {"memory": 8000000000, "shares_host_memory": true, "memory_bandwidth": 1e9,
        "matmul_flops": {"fp32": 1e9}}, "host": {"memory": 8000000000, "cores": 2, "memory_bandwidth": 1e9}}"""
    )
    return file


def test_without_a_profile_there_is_one_note(make_recipe: Callable[..., Recipe]) -> None:
    result, lines = trained(make_recipe())
    assert lines == ["no profile of this machine: after zerooffload calibrate, runs are predicted and held to it"]
    assert result.held is None


@pytest.mark.usefixtures("remembered")
def test_a_run_is_predicted_compared_and_has_the_same_losses(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(training={"steps": 4, "max_grad_norm": 1.0, "accumulation_steps": 2})
    result, lines = trained(recipe)
    assert lines[0].startswith("predicted: ")
    assert result.held is not None
    assert result.held.probe_step == 3
    found = {comparison.name: comparison for comparison in result.held.comparisons}
    leased = found["host, leased"]
    assert leased.predicted == leased.measured > 0
    assert {"step", "compute, busy", "update, busy", "host, leased and activations"} <= set(found)
    plain = train(recipe)
    assert [record.loss for record in result.steps] == [record.loss for record in plain.steps]


KINDS_OF_RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "all on nvme": {},
    "accumulation": {"training": {"accumulation_steps": 2}},
    "checkpointing": {"model": {"gradient_checkpointing": True}},
    "slices, inputs on nvme": {"offload": {"micro_batch_size": 1, "activations": "nvme"}},
    "the optimizer on nvme": {"offload": {"params": "host", "gradients": "host"}},
}


@pytest.mark.parametrize("kind", KINDS_OF_RUNS)
def test_leases_and_bytes_of_a_run_are_as_predicted(
    kind: str, values: dict[str, Any], make_recipe: Callable[..., Recipe], nvme: Path, remembered: Path
) -> None:
    drives = f'"drives": [{{"path": "{nvme}", "read": 1e9, "write": 1e9}}]'
    remembered.write_text(remembered.read_text().removesuffix("}") + f", {drives}}}")
    sections = KINDS_OF_RUNS[kind]
    # In the hidden modes it is a matter of time which parameters are found in host memory still.
    homes = {**dict.fromkeys(ALL, "nvme"), "nvme_paths": [str(nvme)], "update": "after_backward"}
    result, _ = trained(
        make_recipe(
            model={**values["model"], **sections.get("model", {})},
            offload={**homes, **sections.get("offload", {})},
            training={"evaluation_windows": 0, **sections.get("training", {})},
        )
    )
    assert result.held is not None
    exact = [each for each in result.held.comparisons if each.unit == "bytes" and "activations" not in each.name]
    assert {"host, leased", "nvme, leased", "nvme written"} <= {each.name for each in exact}
    assert [each.told() for each in exact if each.is_outside] == []


@pytest.mark.usefixtures("remembered")
def test_a_profile_without_the_drive_is_told_and_the_run_goes_on(
    make_recipe: Callable[..., Recipe], nvme: Path
) -> None:
    result, (line,) = trained(make_recipe(offload={"optimizer": "nvme", "nvme_paths": [str(nvme)]}))
    assert line == (
        "the run is not held to a plan: ConfigError: the profile of this one has no drive:"
        " zerooffload calibrate --path adds it"
    )
    assert (len(result.steps), result.held) == (3, None)


def test_a_profile_of_a_machine_that_computes_elsewhere_is_told(
    make_recipe: Callable[..., Recipe], remembered: Path
) -> None:
    own_memory = '"shares_host_memory": false, "copy_in": 1e9, "copy_out": 1e9'
    remembered.write_text(remembered.read_text().replace('"shares_host_memory": true', own_memory))
    result, (line,) = trained(make_recipe())
    assert "the profile of this one is of a machine that computes elsewhere: zerooffload calibrate" in line
    assert (len(result.steps), result.held) == (3, None)


@pytest.mark.usefixtures("remembered")
def test_whatever_fails_while_predicting_the_run_does_not(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("it cannot be traced\nand here is why")

    monkeypatch.setattr(plan_keeper.Planner, "profile", fail)
    result, lines = trained(make_recipe())
    assert lines == ["the run is not held to a plan: RuntimeError: it cannot be traced"]
    assert len(result.steps) == 3


class Switching(Keeper):
    """Lets updates run at another time after every step."""

    def begin(self, model: nn.Module, result: TrainingResult) -> Iterable[str]:  # noqa: ARG002
        self.chooser = run_of(model.parameters()).update_mode
        self.modes = cycle(UpdateMode)
        return ()

    def finished(self, record: StepRecord) -> Iterable[str]:
        self.chooser.aim_at(next(self.modes))
        return (f"{record.step}: {self.chooser.mode}",)


def test_a_switch_between_two_steps_changes_no_number(make_recipe: Callable[..., Recipe], nvme: Path) -> None:
    homes = {**dict.fromkeys(ALL, "nvme"), "nvme_paths": [str(nvme)], "overwrite": True}
    recipe = make_recipe(offload=homes, training={"steps": 8, "max_grad_norm": 1e3})
    heard = Heard()
    switched, plain = train(recipe, heard, keeper=Switching()), train(recipe)
    assert [line.split(": ")[1] for line in heard.lines[:3]] == list(UpdateMode)
    assert [(step.loss, step.grad_norm) for step in switched.steps] == [
        (step.loss, step.grad_norm) for step in plain.steps
    ]
    assert switched.heldout_after == plain.heldout_after


def test_a_profile_of_another_machine_is_told_and_not_used(
    make_recipe: Callable[..., Recipe], remembered: Path
) -> None:
    remembered.write_text(remembered.read_text().removesuffix("}") + ', "identity": {"cpu": "another one"}}')
    result, (line,) = trained(make_recipe())
    assert "is of another machine (cpu another one there" in line
    assert result.held is None
