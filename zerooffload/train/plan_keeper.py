"""Holds a run to what the profile of its machine predicts: compares a step, and follows how steps change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerooffload.calibration.remembered import remembered_machine
from zerooffload.config import TierName, UpdateMode
from zerooffload.entry.runs import run_of
from zerooffload.errors import BudgetError, ConfigError
from zerooffload.formats import format_seconds
from zerooffload.planner.adapting import OtherSchedule, RunOnPaper, quicker_schedule, with_inputs_of_blocks
from zerooffload.planner.cost import StepKind
from zerooffload.planner.drift import DriftWatch, Shift
from zerooffload.planner.find import homes_of, settings_of
from zerooffload.planner.held import MeasuredStep, compared, in_words, measured_seconds
from zerooffload.planner.plan import STATES, Homes, Plan
from zerooffload.planner.profiles import MachineProfile, ModelProfile
from zerooffload.runtime.run import Run
from zerooffload.train.keeper import HeldRun, Keeper
from zerooffload.train.loop import StepRecord, TrainingResult
from zerooffload.train.planning import Planner, machine_of_run
from zerooffload.train.recipe import Recipe

NUM_COLD_STEPS = 2
"""The first takes memory and fills caches; the second does the first one's hidden updates."""
_STEP, _DRIVE_BYTE = "step", "drive, a byte"


@dataclass(frozen=True)
class _Trial:
    """A mode that was switched to, until its steps tell whether that helped."""

    before: UpdateMode
    before_seconds: float


class PlanKeeper(Keeper):
    """See `Keeper`, and docs/held_to_its_plan.md. Keeps quiet where no profile of the machine is remembered."""

    def __init__(self) -> None:
        self._planner = Planner()
        self._machine: MachineProfile | None = None
        self._profile: ModelProfile | None = None
        self._run: _FollowedRun | None = None

    def prepare(self, recipe: Recipe) -> Iterable[str]:
        """Trace the model, without weights."""
        return self._never_failing(self._prepare(recipe))

    def begin(self, model: nn.Module, result: TrainingResult) -> Iterable[str]:
        """Predict a step of the run as it has been taken."""
        return self._never_failing(self._begin(model, result))

    def finished(self, record: StepRecord) -> Iterable[str]:
        """Compare the probe step; follow the others."""
        return self._never_failing(self._run.finished(record)) if self._run is not None else ()

    def _never_failing(self, lines: Iterator[str]) -> Iterator[str]:
        try:
            yield from lines
        except Exception as error:  # noqa: BLE001 - a run does not fail for want of a plan
            self._machine = self._run = None
            yield f"the run is not held to a plan: {type(error).__name__}: {error}".splitlines()[0]

    def _prepare(self, recipe: Recipe) -> Iterator[str]:
        remembered = remembered_machine()
        if remembered is None:
            yield "no profile of this machine: after zerooffload calibrate, runs are predicted and held to it"
            return
        if remembered.foreign:
            yield remembered.foreign
            return
        if remembered.stale:
            yield remembered.stale
        self._profile = self._planner.profile(recipe, recipe.placement.slice_size or recipe.training.batch_size)
        self._machine = machine_of_run(remembered.profile, recipe)

    def _begin(self, model: nn.Module, result: TrainingResult) -> Iterator[str]:
        if self._machine is None or self._profile is None:
            return
        run, recipe = run_of(model.parameters()), result.recipe
        if self._machine.device.shares_host_memory != result.computes_on_host:
            raise ConfigError(
                f"the profile of {self._machine.name} is of a machine that computes elsewhere:"
                " zerooffload calibrate measures this one"
            )
        if run.plan.planned_bytes(TierName.NVME) and not self._machine.drives:
            raise ConfigError(f"the profile of {self._machine.name} has no drive: zerooffload calibrate --path adds it")
        block_inputs = run.plan.placement.block_inputs
        kind = StepKind(
            schedule=run.update_mode.mode,
            accumulation=recipe.training.accumulation_steps,
            computed_again=self._planner.computed_again(recipe) | frozenset(block_inputs.homes),
            num_slices=recipe.training.batch_size // self._profile.batch_size,
            whole=block_inputs.whole,
            clips=recipe.training.max_grad_norm is not None,
        )
        on_paper = RunOnPaper(
            announced=with_inputs_of_blocks(run.plan, self._profile, kind),
            model=self._profile,
            machine=self._machine,
            kind=kind,
        )
        self.held = HeldRun(estimate=on_paper.estimate(baseline_bytes=result.baseline_bytes))
        self._run = _FollowedRun(on_paper, self.held, result, run, self._planner)
        step = self.held.estimate
        yield (
            f"predicted: {format_seconds(step.seconds)} a step, {step.tokens_per_second:.0f} tokens/s;"
            f" the bound is {step.bound}"
        )


class _FollowedRun:
    """A run whose steps are measured beside what was predicted."""

    def __init__(self, on_paper: RunOnPaper, held: HeldRun, result: TrainingResult, run: Run, planner: Planner) -> None:
        self._on_paper = on_paper
        self._held = held
        self._result = result
        self._mode = run.update_mode
        # Ranks would have to switch together.
        self._may_switch = run.update_mode.wanted == "auto" and run.collectives.world_size == 1
        self._planner = planner
        self._num_cold = NUM_COLD_STEPS
        self._trial: _Trial | None = None
        self._told_homes: Mapping[str, Homes] = homes_of(on_paper.announced)
        self._watch = _new_watch()

    def finished(self, record: StepRecord) -> Iterator[str]:
        """What there is to say of a step."""
        if self._num_cold:
            self._num_cold -= 1
            return
        if record.was_saving:
            return
        step = self._measured(record)
        if self._held.probe_step is None:
            yield from self._probe(step, record.step)
        shift = self._watch.add(_figures(step))
        texts = self._shifted(shift) if shift is not None else self._judged()
        for text in texts:
            self._held.notes.append((record.step, text))
            yield f"step {record.step}: {text}"

    def _measured(self, record: StepRecord) -> MeasuredStep:
        result, max_norm = self._result, self._result.recipe.training.max_grad_norm
        grown = record.report.process_peak_bytes - result.baseline_bytes
        return MeasuredStep(
            report=record.report,
            computes_on_host=result.computes_on_host,
            grown_bytes=grown if result.computes_on_host else None,
            was_clipped=max_norm is not None and record.grad_norm is not None and record.grad_norm > max_norm,
            hides_updates=self._mode.hides,
        )

    def _probe(self, step: MeasuredStep, number: int) -> Iterator[str]:
        self._held.probe_step = number
        self._held.comparisons = compared(self._held.estimate, step)
        outside = [comparison for comparison in self._held.comparisons if comparison.is_outside]
        if not outside:
            yield f"step {number} is as predicted: memory, bytes, and {format_seconds(step.report.seconds)}"
            return
        yield f"step {number} is not as predicted:"
        for comparison in outside:
            yield f"  {comparison.told()}"

    def _shifted(self, shift: Shift) -> Iterator[str]:
        """Say it, and change what a prediction with the rates of now says is better."""
        yield self._told(shift)
        self._trial = None
        schedule = self._mode.mode
        self._on_paper = self._on_paper.updating(schedule).as_measured(shift.now)
        noise_part = shift.noise[_STEP] / shift.before[_STEP]
        may = [time for time in UpdateMode if time is not UpdateMode.DURING_BACKWARD or not self._mode.clips_often]
        other = quicker_schedule(self._on_paper, may, noise_part=noise_part)
        if other is not None:
            yield self._switched(other, shift.now[_STEP])
        yield from self._better_homes(noise_part)

    def _told(self, shift: Shift) -> str:
        before, now = shift.before, shift.now
        text = f"steps take {format_seconds(now[_STEP])}, {format_seconds(before[_STEP])} before"
        if _STEP not in shift.names:
            text = f"steps still take {format_seconds(now[_STEP])}"
        if self._on_paper.kind.schedule is not self._mode.mode:
            return f"{text}; updates run {_words(self._mode.mode)} now, as steps clip more often or less"
        resources = [name for name in _resources(now) if before[name] and shift.differs(name)]
        if _DRIVE_BYTE in shift.names and before[_DRIVE_BYTE]:
            return f"{text}; for the same bytes {in_words('drive', now[_DRIVE_BYTE] / before[_DRIVE_BYTE])}"
        if not resources:
            return f"{text}; no resource that is measured accounts for it"
        name = max(resources, key=lambda name: abs(now[name] - before[name]))
        return f"{text}; {in_words(name, now[name] / before[name])}"

    def _switched(self, other: OtherSchedule, seconds: float) -> str:
        gain = f"predicted {format_seconds(other.seconds)} instead of {format_seconds(other.now_seconds)} a step"
        if not self._may_switch:
            return f"with updates {_words(other.schedule)} steps would be shorter, {gain}: offload.update says when"
        self._trial = _Trial(self._on_paper.kind.schedule, seconds)
        self._update_at(other.schedule)
        return f"updates run {_words(other.schedule)} from now on, {gain}; the numbers are the same"

    def _judged(self) -> Iterator[str]:
        """Whether the last switch has helped, once enough steps tell; one that has not is taken back."""
        now, trial = self._watch.before, self._trial
        if trial is None or now is None:
            return
        self._trial = None
        told = f"{format_seconds(now[_STEP])} a step, {format_seconds(trial.before_seconds)} before"
        if now[_STEP] < trial.before_seconds:
            yield f"that has helped: {told}"
            return
        self._update_at(trial.before)
        yield f"that has not helped: {told}; updates run {_words(trial.before)} again"

    def _update_at(self, schedule: UpdateMode) -> None:
        self._mode.aim_at(schedule)
        self._on_paper = self._on_paper.updating(schedule)
        self._watch, self._num_cold = _new_watch(), NUM_COLD_STEPS

    def _better_homes(self, noise_part: float) -> Iterator[str]:
        recipe, limits = self._result.recipe, self._on_paper.announced.limits
        freed: dict[str, Any] = dict.fromkeys([*STATES, "update"], "auto")
        freed |= {"host_memory": limits.host_bytes, "nvme_space": limits.nvme_bytes}
        if not limits.device_shares_host:
            freed["device_memory"] = limits.device_bytes
        if recipe.offload.activations == "auto":
            # What that means in this run: other activations are no other homes.
            freed["activations"] = "keep" if recipe.offload.micro_batch_size is None else "device"
        offload = recipe.offload.model_copy(update=freed)
        try:
            plan = self._planner.plan(recipe.model_copy(update={"offload": offload}), self._on_paper.machine)
        except BudgetError:
            return
        now_seconds = self._on_paper.estimate().seconds
        if plan.homes != self._told_homes and now_seconds - plan.estimate.seconds > noise_part * now_seconds:
            self._told_homes = plan.homes
            yield (
                f"zerooffload plan would now choose {_moved(self._on_paper, plan)}:"
                f" {format_seconds(plan.estimate.seconds)} instead of {format_seconds(now_seconds)} a step, predicted."
                f" To move them, go on from a checkpoint: {_resume_command(recipe, plan)}"
            )


def _resources(figures: Mapping[str, float]) -> list[str]:
    """Of a step's figures, the resources."""
    return [name for name in figures if name not in (_STEP, _DRIVE_BYTE)]


def _new_watch() -> DriftWatch:
    return DriftWatch([_STEP, _DRIVE_BYTE])


def _figures(step: MeasuredStep) -> dict[str, float]:
    moved = step.report.bytes_moved
    nbytes = moved.get("nvme_read", 0) + moved.get("nvme_written", 0)
    seconds = measured_seconds(step)
    return {_STEP: step.report.seconds, _DRIVE_BYTE: seconds["drive"] / nbytes if nbytes else 0.0, **seconds}


def _moved(on_paper: RunOnPaper, plan: Plan) -> str:
    """The homes that are others in a plan, in words."""
    before, texts = homes_of(on_paper.announced), []
    for state in STATES:
        tiers = {name: getattr(homes, state) for name, homes in plan.homes.items()}
        others = Counter(tier for name, tier in tiers.items() if tier is not getattr(before[name], state))
        texts += [f"{state} of {number} of {len(tiers)} units on {tier}" for tier, number in others.items()]
    return ", ".join(texts)


def _resume_command(recipe: Recipe, plan: Plan) -> str:
    directory = recipe.checkpoint.directory if recipe.checkpoint is not None else "CHECKPOINT"
    settings = settings_of(plan.homes)
    if any(isinstance(tier, dict) for tier in settings.values()):
        return f"zerooffload resume {directory} with the homes that zerooffload plan prints"
    return f"zerooffload resume {directory} " + " ".join(f"--set offload.{k}={v}" for k, v in settings.items())


def _words(schedule: str) -> str:
    return schedule.replace("_", " ")
