from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.folders import leftovers

import zerooffload as zo
from zerooffload import BudgetError, ConfigError
from zerooffload.integrations.huggingface import ByteTokenizer, ModelSource, next_token_loss, random_model
from zerooffload.train import loop, train
from zerooffload.train.data import BatchOrder, Windows, open_tokens
from zerooffload.train.loop import Observer, StepRecord, evaluate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerooffload.train.recipe import Recipe

pytest.importorskip("transformers")


def in_plain_torch(recipe: Recipe, cache: Path) -> tuple[list[float], float, float]:
    """Losses of the same training with torch's own optimizer and clipping, and the held-out loss around it."""
    settings, training = recipe.optimizer, recipe.training
    model = random_model(ModelSource(config=recipe.model.config, seed=training.seed))
    tokens = open_tokens(recipe.data.path, "text", ByteTokenizer(), cache)
    windows = Windows(tokens, training.sequence_length, training.evaluation_windows)
    optimizer = torch.optim.AdamW(model.parameters(), **settings.settings())
    order = BatchOrder(windows.num_training, training.batch_size, training.seed)
    before = evaluate(model, windows, training.batch_size)
    losses = []
    for _ in range(training.steps):
        total = 0.0
        for _ in range(training.accumulation_steps):
            loss = next_token_loss(model, *windows.training(next(order))) / training.accumulation_steps
            loss.backward()
            total += loss.item()
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, before, evaluate(model, windows, training.batch_size)


def test_it_trains_as_plain_torch_does(make_recipe: Callable[..., Recipe], cache: Path) -> None:
    recipe = make_recipe(training={"steps": 4, "accumulation_steps": 2, "max_grad_norm": 0.5})
    result = train(recipe)
    losses, before, after = in_plain_torch(recipe, cache)
    assert [record.loss for record in result.steps] == pytest.approx(losses, rel=1e-4)
    assert (result.heldout_before, result.heldout_after) == pytest.approx((before, after), rel=1e-4)
    assert result.heldout_after is not None
    assert after < before
    assert all(record.grad_norm is not None and record.grad_norm > 0 for record in result.steps)


def test_losses_do_not_depend_on_the_tier(make_recipe: Callable[..., Recipe], nvme: Path) -> None:
    on_host = train(make_recipe())
    on_nvme = train(
        make_recipe(offload={"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "nvme_paths": [str(nvme)]})
    )
    assert [record.loss for record in on_nvme.steps] == [record.loss for record in on_host.steps]
    assert on_nvme.heldout_after == on_host.heldout_after
    assert sum(record.report.bytes_moved["nvme_written"] for record in on_nvme.steps) > 0


@pytest.mark.parametrize("kept", ["device", "nvme"])
def test_slices_inside_blocks_train_as_whole_batches_do(
    kept: str, make_recipe: Callable[..., Recipe], nvme: Path
) -> None:
    """Batch and sequence have the same length here, which transformers' names settle."""
    sections = {"training": {"batch_size": 16, "steps": 4}, "offload": {"nvme_paths": [str(nvme)]}}
    whole = train(make_recipe(**sections))
    sections["offload"] |= {"micro_batch_size": 2, "activations": kept}
    sliced = train(make_recipe(**sections))
    assert [record.loss for record in sliced.steps] == pytest.approx([record.loss for record in whole.steps], rel=1e-4)
    assert sliced.heldout_after == pytest.approx(whole.heldout_after, rel=1e-4)
    assert whole.activations is not None
    assert sliced.activations is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [("adam", {"betas": [0.8, 0.9]}), ("adagrad", {"lr_decay": 0.1}), ("lion", {}), ("sgd", {"momentum": 0.5})],
)
def test_each_optimizer_trains(name: str, settings: dict[str, Any], make_recipe: Callable[..., Recipe]) -> None:
    result = train(make_recipe(optimizer={"name": name, "lr": 1e-2, **settings}, offload={"moments": "bf16"}))
    assert result.heldout_after is not None
    assert result.heldout_before is not None
    assert result.heldout_after < result.heldout_before


def test_fp16_scales_its_loss_and_skips_what_overflows(make_recipe: Callable[..., Recipe]) -> None:
    result = train(make_recipe(offload={"compute_dtype": "fp16"}, training={"steps": 6, "max_grad_norm": 1.0}))
    assert result.heldout_after is not None
    assert result.heldout_before is not None
    assert result.heldout_after < result.heldout_before
    assert [record.report.step for record in result.steps][-1] >= 1


def test_the_schedule_sets_the_rate(make_recipe: Callable[..., Recipe]) -> None:
    result = train(make_recipe(schedule={"kind": "linear", "warmup_steps": 2}))
    assert [record.lr for record in result.steps] == pytest.approx([5e-3, 1e-2, 1e-2])


def test_memory_is_told_before_and_measured_after(make_recipe: Callable[..., Recipe]) -> None:
    result = train(make_recipe())
    assert result.activations is not None
    assert result.activations.peak_bytes > result.activations.saved_bytes > 0
    assert 0 < result.baseline_bytes <= result.process_peak_bytes
    tiers = {tier.name: tier for tier in result.steps[-1].report.tiers}
    assert tiers["host"].peak_bytes == tiers["host"].planned_bytes


def test_a_bf16_run_takes_its_dtype_from_the_recipe(make_recipe: Callable[..., Recipe]) -> None:
    result = train(make_recipe(offload={"compute_dtype": "bf16"}, training={"steps": 1}))
    assert result.steps[0].loss == pytest.approx(5.5, abs=0.2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_several_backwards_take_fp32(
    dtype: str, make_recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    alone, added = (
        train(make_recipe(offload={"compute_dtype": dtype}, training={"steps": 1, "accumulation_steps": number}))
        for number in (1, 2)
    )
    leased = [result.steps[-1].report.tiers[1].leased_bytes for result in (alone, added)]
    # Embedding and head, two blocks, and the root's norm, each in whole pages.
    numels = [257 * 16, 257 * 16, 2336, 2336, 16]
    pages = [sum(-(-width * numel // 4096) for numel in numels) for width in (2, 4)]
    assert leased[1] - leased[0] == 4096 * (pages[1] - pages[0])
    assert [record for record in caplog.records if "add up" in record.getMessage()] == []


def test_checkpointing_changes_memory_and_not_numbers(make_recipe: Callable[..., Recipe]) -> None:
    config = make_recipe().model.config
    assert isinstance(config, dict)
    plain, checkpointed = (
        train(make_recipe(model={"config": {**config, "num_hidden_layers": 6}, "gradient_checkpointing": on}))
        for on in (False, True)
    )
    assert [record.loss for record in plain.steps] == [record.loss for record in checkpointed.steps]
    assert plain.activations is not None
    assert checkpointed.activations is not None
    assert checkpointed.activations.peak_bytes < plain.activations.peak_bytes


def test_the_observer_is_told_in_order(make_recipe: Callable[..., Recipe]) -> None:
    told: list[Any] = []

    class Writer(Observer):
        def announced(self, result: object) -> None:  # noqa: ARG002
            told.append("announced")

        def evaluated(self, when: str, loss: float) -> None:  # noqa: ARG002
            told.append(when)

        def finished_step(self, record: StepRecord) -> None:
            told.append(record.step)

    train(make_recipe(), Writer())
    assert told == ["announced", "before training", 1, 2, 3, "after training"]


def test_an_interrupt_in_mid_step_leaves_nothing(
    make_recipe: Callable[..., Recipe], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    steps: list[int] = []
    handlers_at_close: list[object] = []
    close = zo.close

    def watched_close(model: torch.nn.Module) -> None:
        handlers_at_close.append(signal.getsignal(signal.SIGINT))
        close(model)

    monkeypatch.setattr(zo, "close", watched_close)

    class Interrupting(Observer):
        def finished_step(self, record: StepRecord) -> None:
            steps.append(record.step)

            def interrupted(*_: object) -> torch.Tensor:
                loss = next_token_loss(*_)  # type: ignore[arg-type]
                loss.backward(retain_graph=True)
                raise KeyboardInterrupt

            monkeypatch.setattr(loop, "next_token_loss", interrupted)

    with pytest.raises(KeyboardInterrupt):
        train(
            make_recipe(offload={"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(nvme)]}),
            Interrupting(),
        )
    assert steps == [1]
    assert leftovers(nvme) == []
    # A second Ctrl-C does not disturb the end.
    assert handlers_at_close == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_budget_too_small_is_refused_before_training(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(BudgetError, match="smallest change"):
        train(make_recipe(offload={"host_memory": "4KiB"}))


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(make_recipe: Callable[..., Recipe]) -> None:
    config = make_recipe().model.config
    assert isinstance(config, dict)
    with pytest.raises(ConfigError, match="has 257 tokens, the model knows 256"):
        train(make_recipe(model={"config": {**config, "vocab_size": 256}}))


def test_what_cannot_be_predicted_is_left_open(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("depends on values")

    monkeypatch.setattr(loop, "predict_activation_bytes", refuse)
    result = train(make_recipe(training={"steps": 1, "evaluation_windows": 0}))
    assert result.activations is None
    assert result.heldout_before is result.heldout_after is None
