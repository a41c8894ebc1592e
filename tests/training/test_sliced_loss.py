"""Language models whose blocks, head and loss run in slices, beside micro-batches in the usual loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.reference_training import Recipe, differences, train_offloaded, train_plain
from support.slices_by_hand import in_slices_by_hand
from support.small_models import batch, small_gpt2, small_llama, small_mixtral
from torch import nn

import zerooffload as zo
from zerooffload.integrations.huggingface import SLICE_RULES, slice_language_loss
from zerooffload.sharding.grouping import find_units

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH, LENGTH, SIZE = 4, 9, 2
"""So that a sample has eight labels: dividing by their number is exact, here and in micro-batches."""


untied_llama = partial(small_llama, tied=False, seed=21)
untied_mixtral = partial(small_mixtral, seed=22)


def tokens_of(step: int) -> torch.Tensor:
    return torch.cat([batch(step, number) for number in range(2)])[:, :LENGTH]


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    labels = tokens if labels is None else labels
    loss: torch.Tensor = model(input_ids=tokens, labels=labels, use_cache=False).loss
    return loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    with zo.full_params(model, grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("build", [untied_llama, untied_mixtral, small_gpt2], ids=["llama", "mixtral", "gpt2"])
def test_blocks_have_the_bits_of_the_usual_loop(build: Callable[[], nn.Module], nvme: Path) -> None:
    """Gradients of micro-batches add up in the same order. Only what the root computes for the whole batch adds up in
    another: embeddings and the last norm."""
    plain = build()
    for part in tokens_of(0).split(SIZE):
        (loss_of(plain, part) / (BATCH // SIZE)).backward()
    model = build()
    slice_language_loss(model)
    config = zo.OffloadConfig(params="nvme", nvme_paths=[nvme], micro_batch_size=SIZE, threads=1)
    zo.offload(model, config)
    loss_of(model, tokens_of(0)).backward()
    found = gradients(model)
    zo.close(model)
    in_slices = [unit.name for unit in find_units(plain, "auto") if unit.is_block]
    if build is not small_gpt2:
        # Where the head is tied, its gradient and the embedding's are one.
        in_slices.append("lm_head")
    names = [name for name, _ in plain.named_parameters() if name.startswith(tuple(f"{unit}." for unit in in_slices))]
    assert len(names) >= 2 * 8 + 1
    for name, param in plain.named_parameters():
        assert param.grad is not None
        if name in names:
            assert torch.equal(found[name], param.grad), name
    others = [name for name, _ in plain.named_parameters() if name not in names]
    assert not all(torch.equal(found[name], plain.get_parameter(name).grad) for name in others)


def masked_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """In plain PyTorch head and loss run slice by slice here, in ours inside the model."""
    tokens = tokens.view(BATCH, -1)
    labels = tokens.masked_fill(torch.arange(tokens.shape[1]) >= torch.tensor([[6], [2], [5], [4]]), -100)
    if "forward" in vars(model):
        return loss_of(model, tokens, labels)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    parts = [
        nn.functional.cross_entropy(model.lm_head(part).flatten(0, 1), target.flatten(), reduction="sum")
        for part, target in zip(hidden.split(SIZE), targets.split(SIZE), strict=True)
    ]
    number = (targets != -100).sum()
    return parts[0] / number + parts[1] / number


@pytest.mark.parametrize("homes", [("host", "host", "host"), ("nvme", "nvme", "nvme")])
@pytest.mark.parametrize("build", [untied_llama, small_llama], ids=["untied", "tied"])
@pytest.mark.usefixtures("small_chunks")
def test_training_with_masked_labels(build: Callable[[], nn.Module], homes: tuple[str, str, str], nvme: Path) -> None:
    """The mean over all labels, to the bit that of plain PyTorch in slices."""
    recipe = Recipe(build=build, loss=masked_loss, num_steps=3)
    plain = train_plain(replace(recipe, prepare=in_slices_by_hand(SIZE)))
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    outcome = train_offloaded(
        replace(recipe, prepare=slice_language_loss), micro_batch_size=SIZE, nvme_paths=[nvme], **config
    )
    assert differences(plain, outcome) == []


def test_the_mean_is_that_of_the_whole_batch() -> None:
    """And not that of the micro-batches' means, which differ where labels are masked."""
    model = untied_llama()
    tokens = tokens_of(1)
    labels = tokens.masked_fill(torch.arange(LENGTH) >= torch.tensor([[9], [9], [2], [2]]), -100)
    whole = float(loss_of(model, tokens, labels).detach())
    of_parts = [float(loss_of(model, *part).detach()) for part in zip(tokens.split(2), labels.split(2), strict=True)]
    slice_language_loss(model, micro_batch_size=SIZE)
    assert float(loss_of(model, tokens, labels).detach()) == pytest.approx(whole, rel=2.0**-21)
    assert abs(sum(of_parts) / 2 - whole) > 2.0**-10 * whole


def test_logits_are_there_where_they_are_wanted() -> None:
    model, tokens = untied_llama(), tokens_of(0)
    before = model(input_ids=tokens, use_cache=False).logits
    slice_language_loss(model, micro_batch_size=SIZE)
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens, labels=tokens, use_cache=False).logits, before)
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    assert output.logits.shape == before.shape
    with pytest.raises(zo.ConfigError, match="logits that do not exist"):
        output.logits.argmax(-1)
    model.eval()
    assert torch.equal(model(input_ids=tokens, labels=tokens, use_cache=False).logits, before)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model, tokens = untied_llama(), tokens_of(0)
    slice_language_loss(model, micro_batch_size=SIZE)
    inner = model.lm_head.__dict__["forward"]
    model.lm_head.__dict__["forward"] = lambda hidden: inner(hidden) * 0.5
    with pytest.raises(zo.ConfigError, match=r"use zo\.sliced_loss"):
        loss_of(model, tokens)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(zo.ConfigError, match=r"Linear has no linear head.*zo\.sliced_loss"):
        slice_language_loss(nn.Linear(2, 2))


def test_router_losses_join_the_sliced_loss() -> None:
    model, tokens = untied_mixtral(), tokens_of(0)
    model.config.output_router_logits = True
    whole = float(loss_of(model, tokens).detach())
    slice_language_loss(model)
    zo.offload(model, zo.OffloadConfig(micro_batch_size=SIZE, threads=1))
    loss = loss_of(model, tokens)
    assert float(loss.detach()) == pytest.approx(whole, rel=2.0**-21)
    loss.backward()
    zo.close(model)


def test_rules_of_transformers_settle_what_coincides() -> None:
    """Batch, sequence and mask all of the same length."""

    def square_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.view(-1)[:16].view(4, 4)
        mask = (torch.arange(4) < torch.tensor([[4], [3], [2], [4]])).long()
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False).loss
        return loss

    recipe = Recipe(loss=square_loss, num_steps=2)
    plain = train_plain(replace(recipe, prepare=in_slices_by_hand(SIZE)))
    assert differences(plain, train_offloaded(recipe, micro_batch_size=SIZE, slice_rules=SLICE_RULES)) == []
    with pytest.raises(zo.ConfigError, match="may be a part of the batch or not"):
        train_offloaded(recipe, micro_batch_size=SIZE)
