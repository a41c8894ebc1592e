"""The training loop: a recipe becomes a model on its tiers, steps, and an account of both."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import zerooffload as zo
from zerooffload.accelerator import default_accelerator
from zerooffload.checkpoint.model_weights import ModelWeights
from zerooffload.entry.offloading import offload_opened
from zerooffload.entry.training import watch
from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface import (
    ModelSource,
    build_model,
    load_tokenizer,
    model_config,
    next_token_loss,
    opened_model,
    random_model,
    slice_language_loss,
)
from zerooffload.integrations.huggingface.tokenizers import BYTES
from zerooffload.machine import cache_folder
from zerooffload.planner.activations import ActivationForecast, predict_activation_bytes
from zerooffload.runtime.saving import SaveTicket
from zerooffload.telemetry import Listener, StepReport, process_peak_bytes
from zerooffload.train.data import BatchOrder, Windows, open_tokens
from zerooffload.train.keeper import HeldRun, Keeper
from zerooffload.train.process import give_freed_memory_back, resident_bytes_trimmed, warm_up
from zerooffload.train.ranks import Ranks, joined_ranks, use_own_device
from zerooffload.train.recipe import Recipe
from zerooffload.train.resume import TRACKED_NAME, RecordedRecipe
from zerooffload.train.schedule import lr_factor


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step. `loss` is the mean over its tokens; `grad_norm` is before clipping, None without clipping.

    `was_saving` tells whether a checkpoint was being written when it began.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens: int
    report: StepReport
    was_saving: bool = False


@dataclass(kw_only=True)
class TrainingResult:
    """What a run did. Grows while it runs; bytes of the process are resident memory.

    Attributes
    ----------
    activations : ActivationForecast, optional
        None where nothing can be told in advance: the model's way depends on values, or blocks are computed again.
    baseline_bytes : int
        Before the model was made.
    computes_on_host : bool
        Whether activations are in host memory.
    heldout_before, heldout_after : float, optional
        Mean loss on the windows held out.
    held : HeldRun, optional
        What was predicted, and how it came; None where nothing was.
    """

    recipe: Recipe
    activations: ActivationForecast | None = None
    baseline_bytes: int = 0
    process_peak_bytes: int = 0
    computes_on_host: bool = True
    heldout_before: float | None = None
    heldout_after: float | None = None
    steps: list[StepRecord] = field(default_factory=list)
    held: HeldRun | None = None


class Observer:
    """Is told how a run goes. This one ignores it."""

    def doing(self, what: str) -> None:
        """A part of the run that shows no steps begins."""

    def resumed(self, num_done: int) -> None:
        """Training goes on behind step `num_done`."""

    def announced(self, result: TrainingResult) -> None:
        """The model is on its tiers; training begins."""

    def evaluated(self, when: str, loss: float) -> None:
        """The held-out loss is known."""

    def finished_step(self, record: StepRecord) -> None:
        """A step is done."""

    def noticed(self, text: str) -> None:
        """Something about the run is worth a line."""


def train(
    recipe: Recipe,
    observer: Observer | None = None,
    *,
    resume: bool = False,
    checkpoint: Path | None = None,
    listeners: Sequence[Listener] = (),
    keeper: Keeper | None = None,
) -> TrainingResult:
    """Train as the recipe says. Whatever ends it, the tiers are left empty, but for steps that were committed.

    Parameters
    ----------
    resume : bool
        Go on from the newest step that the nvme paths hold.
    checkpoint : pathlib.Path, optional
        Go on from that one.
    listeners : Sequence[Listener]
        Get what takes place in the steps.
    keeper : Keeper, optional
        Holds the run to a plan; of several ranks, on one that computes as the others do.

    Under torchrun every rank calls it, trains on batches of its own, and keeps its shard of every state.

    Raises
    ------
    ConfigError
        If a setting, the model or the data cannot work as given.
    BudgetError
        If the model does not fit the budgets.
    TierIOError
        If a tier's files cannot be read or written.
    """
    observer, keeper = observer or Observer(), keeper or Keeper()
    result = TrainingResult(recipe=recipe)
    torch.manual_seed(recipe.training.seed)
    give_freed_memory_back()
    use_own_device()
    device = default_accelerator().device
    result.computes_on_host = device.type == "cpu"
    source = model_source(recipe)
    config = model_config(source)
    observer.doing("reading the data")
    windows = _windows(recipe, int(config.get_text_config().vocab_size))
    observer.doing("predicting activations")
    result.activations = _predict(recipe, source, config, device)
    _tell(observer, keeper.prepare(recipe))
    warm_up()
    result.baseline_bytes = resident_bytes_trimmed()
    observer.doing("loading the model")
    opening = offloaded(lambda: _opened(source, config, recipe), recipe)
    with joined_ranks(recipe.training.rank_timeout_seconds) as ranks, opening as model:
        observer.announced(result)
        _tell(observer, keeper.begin(model, result))
        result.held = keeper.held
        loop = _Loop(model, windows, recipe, ranks)
        _begin(loop, result, observer, resume=resume, checkpoint=checkpoint)
        with watch(model, listeners):
            for record in loop.steps():
                result.steps.append(record)
                observer.finished_step(record)
                _tell(observer, keeper.finished(record))
        result.heldout_after = loop.evaluate(observer, "after training")
        result.process_peak_bytes = process_peak_bytes()
    return result


def _tell(observer: Observer, texts: Iterable[str]) -> None:
    for text in texts:
        observer.noticed(text)


def _begin(loop: _Loop, result: TrainingResult, observer: Observer, *, resume: bool, checkpoint: Path | None) -> None:
    """Evaluate; a run that goes on was evaluated before."""
    if checkpoint is not None:
        observer.doing("loading the checkpoint")
        loop.load(checkpoint)
        observer.resumed(loop.num_done)
    elif resume:
        observer.doing("verifying what was committed")
        loop.resume()
        observer.resumed(loop.num_done)
    else:
        result.heldout_before = loop.evaluate(observer, "before training")


class _Loop:
    """What a run trains with; its states are committed with every step, where the placement allows it."""

    def __init__(self, model: nn.Module, windows: Windows, recipe: Recipe, ranks: Ranks) -> None:
        training = recipe.training
        self.num_done = 0
        self._model = model
        self._windows = windows
        self._recipe = recipe
        self._ranks = ranks
        self._save: SaveTicket | None = None
        self._optimizer = recipe.optimizer.make(model.parameters())
        self._scaler = zo.GradScaler(enabled=recipe.offload.compute_dtype == "fp16")
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: lr_factor(recipe.schedule, step, training.steps)
        )
        self._order = BatchOrder(windows.num_training, training.batch_size, training.seed)
        zo.track(
            model,
            schedule=self._schedule,
            scaler=self._scaler,
            order=self._order,
            **{TRACKED_NAME: RecordedRecipe(recipe)},
        )

    def resume(self) -> None:
        """Go on from what the nvme paths hold."""
        if not zo.resume(self._model, self._optimizer):
            raise ConfigError("there is no finished step to go on from: start with zerooffload train")
        self._find_place()

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        zo.load(checkpoint, self._model, self._optimizer)
        self._find_place()

    def _find_place(self) -> None:
        num_steps = self._recipe.training.steps
        # Not the optimizer's steps: those that a scaler skipped count too.
        self.num_done = self._schedule.last_epoch
        if self.num_done >= num_steps:
            raise ConfigError(
                f"the run has done {self.num_done} of its {num_steps} steps:"
                f" to train longer, raise them with --set training.steps={self.num_done + num_steps}"
            )

    def evaluate(self, observer: Observer, when: str) -> float | None:
        """The held-out loss; None if nothing is held out."""
        if not self._windows.num_heldout:
            return None
        observer.doing("evaluating")
        loss = evaluate(self._model, self._windows, self._recipe.training.batch_size)
        observer.evaluated(when, loss)
        return loss

    def steps(self) -> Iterator[StepRecord]:
        """Train; what is yielded is done."""
        saves = self._recipe.checkpoint
        for step in range(self.num_done + 1, self._recipe.training.steps + 1):
            yield self._step(step)
            if saves is not None and (step % saves.every_steps == 0 or step == self._recipe.training.steps):
                # The one before: what failed is told before another step is trained in vain.
                self._finish_save()
                self._save = zo.save(
                    saves.directory, self._model, self._optimizer, blocking=False, keep_last=saves.keep_last
                )
        self._finish_save()

    def _finish_save(self) -> None:
        if self._save is not None:
            self._save.wait()

    def _step(self, step: int) -> StepRecord:
        model, training, ranks = self._model, self._recipe.training, self._ranks
        begin, was_saving = time.perf_counter(), self._save is not None and not self._save.done()
        lr = float(self._optimizer.param_groups[0]["lr"])
        loss = 0.0
        for _ in range(training.accumulation_steps):
            # The ranks' batches follow one another in the order that one rank would take them in.
            mine = [next(self._order) for _ in range(ranks.world_size)][ranks.rank]
            micro_loss = self._loss(*self._windows.training(mine)) / training.accumulation_steps
            self._scaler.scale(micro_loss).backward()
            loss += micro_loss.item()
        norm = None
        if training.max_grad_norm is not None:
            self._scaler.unscale_(self._optimizer)
            norm = float(zo.clip_grad_norm_(model, training.max_grad_norm))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._schedule.step()
        return StepRecord(
            step=step,
            loss=ranks.mean(loss),
            lr=lr,
            grad_norm=norm,
            seconds=time.perf_counter() - begin,
            tokens=training.tokens_per_step * ranks.world_size,
            report=zo.step_report(model),
            was_saving=was_saving,
        )

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As `next_token_loss`; in slices where blocks run in slices."""
        if self._recipe.offload.micro_batch_size is None:
            return next_token_loss(self._model, inputs, targets)
        device = next(self._model.parameters()).device
        targets = targets.to(device)
        # They are not to be shifted: `inputs` end where they do.
        output = self._model(input_ids=inputs.to(device), labels=targets, shift_labels=targets)
        loss: torch.Tensor = output.loss
        return loss


@torch.no_grad()
def evaluate(model: nn.Module, windows: Windows, batch_size: int) -> float:
    """Mean loss on the windows held out."""
    was_training = model.training
    model.eval()
    total = 0.0
    for first in range(0, windows.num_heldout, batch_size):
        indices = range(first, min(first + batch_size, windows.num_heldout))
        total += next_token_loss(model, *windows.heldout(indices)).item() * len(indices)
    model.train(was_training)
    return total / windows.num_heldout


def model_source(recipe: Recipe) -> ModelSource:
    """What [model] names."""
    section = recipe.model
    return ModelSource(
        name=section.name,
        config=section.config,
        seed=recipe.training.seed,
        dtype=recipe.offload.torch_compute_dtype,
        gradient_checkpointing=section.gradient_checkpointing,
        trust_remote_code=section.trust_remote_code,
    )


def _windows(recipe: Recipe, vocabulary_numel: int) -> Windows:
    section, training = recipe.model, recipe.training
    name = section.tokenizer or section.name or BYTES
    tokenizer = load_tokenizer(name, trust_remote_code=section.trust_remote_code)
    if tokenizer.vocabulary_numel > vocabulary_numel:
        raise ConfigError(
            f"the tokenizer {name} has {tokenizer.vocabulary_numel} tokens, the model knows {vocabulary_numel}:"
            " name the tokenizer that belongs to the model"
        )
    tokens = open_tokens(recipe.data.path, recipe.data.field, tokenizer, cache_folder() / "tokens")
    return Windows(tokens, training.sequence_length, training.evaluation_windows)


def _predict(recipe: Recipe, source: ModelSource, config: object, device: torch.device) -> ActivationForecast | None:
    """Activations of one backward's batch; None where the model cannot be run without values, or runs otherwise."""
    if recipe.offload.micro_batch_size is not None or recipe.offload.activations != "auto":
        return None
    shape = (recipe.training.batch_size, recipe.training.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    try:
        return predict_activation_bytes(
            lambda: build_model(source, config),
            lambda model: next_token_loss(model, tokens, tokens),
            device=device,
        )
    except RuntimeError:
        return None


@contextmanager
def offloaded(
    open_model: Callable[[], AbstractContextManager[tuple[nn.Module, ModelWeights | None]]], recipe: Recipe
) -> Iterator[nn.Module]:
    """The model that `open_model` makes, on the tiers that a recipe names; they are given back in any case."""
    model = offload_opened(open_model, recipe.placement)
    try:
        yield model
    finally:
        with _no_interrupts():
            zo.close(model)


@contextmanager
def _opened(source: ModelSource, config: object, recipe: Recipe) -> Iterator[tuple[nn.Module, ModelWeights | None]]:
    """The model as it is offloaded, and where its weights are read from, if they are not random."""
    opened: AbstractContextManager[tuple[nn.Module, ModelWeights | None]]
    if source.name is None:
        opened = nullcontext((random_model(source, config), None))
    else:
        opened = opened_model(source, config, strict=recipe.model.strict)
    with opened as (model, weights):
        if recipe.offload.micro_batch_size is not None:
            slice_language_loss(model)
        yield model, weights


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not leave files behind."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        # Not the main thread, which alone gets interrupts.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
