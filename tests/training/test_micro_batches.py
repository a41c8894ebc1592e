"""Blocks in slices: the numbers, the bytes that move, the memory that is leased, and what is refused."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import TIERS, cpu_with_simulated_drive, least_memory, simulated
from support.reference_training import (
    Outcome,
    Recipe,
    current_params,
    differences,
    language_loss,
    offload_prepared,
    train_offloaded,
    train_plain,
)
from support.simulated_engine import Fault
from support.slices_by_hand import in_slices_by_hand
from support.small_models import VOCABULARY, batch, small_gpt2, small_llama, small_mixtral
from support.training_recipes import evaluate, freeze, generate, with_checkpointing, with_dropout
from torch import nn
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import zerooffload as zo
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.runtime.sliced_block import SlicedBlock, Slicing
from zerooffload.runtime.sliced_call import KeptByAutograd
from zerooffload.sharding.grouping import find_units

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH, LENGTH = 4, 6


def small_t5(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(12)
    config = T5Config(
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCABULARY,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def small_vit() -> nn.Module:
    torch.manual_seed(14)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def loss_of_four(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens as a batch of four."""
    return language_loss(model, tokens.view(BATCH, LENGTH))


def padded_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """With sequences of different lengths, so that there is a mask."""
    tokens = tokens.view(BATCH, LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor([[6], [3], [5], [4]])
    labels = tokens.masked_fill(~mask, -100)
    loss: torch.Tensor = model(input_ids=tokens, labels=labels, attention_mask=mask.long(), use_cache=False).loss
    return loss


def image_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    images = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(int(tokens.sum())))
    loss: torch.Tensor = model(pixel_values=images, labels=tokens.view(-1)[:BATCH] % 2).loss
    return loss


def tiny_batch_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens as a batch of eight."""
    return language_loss(model, tokens.view(8, 3))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"build": small_llama, "loss": padded_loss},
    "gpt2": {"build": small_gpt2, "loss": padded_loss},
    "t5": {"build": small_t5, "loss": padded_loss},
    "mixtral": {"build": small_mixtral, "loss": padded_loss},
    "vit": {"build": small_vit, "loss": image_loss},
}
RECIPES = {
    name: Recipe(num_steps=3, options={"betas": (0.9, 0.99), "weight_decay": 0.1}, **changes)
    for name, changes in FAMILIES.items()
}
LLAMA = RECIPES["llama"]


def by_hand(recipe: Recipe, size: int) -> Outcome:
    backwards = BATCH // size > 2
    return train_plain(replace(recipe, prepare=in_slices_by_hand(size, backwards=backwards)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_checkpointed_slices_in_plain_pytorch(family: str, size: int) -> None:
    recipe = RECIPES[family]
    assert differences(by_hand(recipe, size), train_offloaded(recipe, micro_batch_size=size)) == []


@pytest.mark.parametrize("update", ["after_backward", "under_next_forward", "during_backward"])
@pytest.mark.parametrize("homes", [("nvme", "nvme", "nvme"), ("host", "nvme", "device"), ("nvme", "device", "host")])
@pytest.mark.usefixtures("small_chunks")
def test_wherever_states_live_and_whenever_they_are_updated(
    homes: tuple[str, str, str], update: str, nvme: Path
) -> None:
    recipe = replace(LLAMA, num_steps=4)
    config = dict(zip(("params", "optimizer", "gradients"), homes, strict=True)) | {"nvme_paths": [nvme]}
    outcome = train_offloaded(recipe, micro_batch_size=2, update=update, **config)
    assert differences(by_hand(recipe, 2), outcome) == []


@pytest.mark.parametrize("homes", [("host", "host", "host"), ("nvme", "nvme", "nvme")])
@pytest.mark.parametrize("kept", TIERS)
@pytest.mark.usefixtures("small_chunks", "small_pages")
def test_beside_a_device_with_memory_of_its_own(kept: str, homes: tuple[str, str, str], nvme: Path) -> None:
    config = dict(zip(("params", "optimizer", "gradients"), homes, strict=True)) | {"nvme_paths": [nvme]}
    with simulated() as environment:
        outcome = train_offloaded(LLAMA, environment, micro_batch_size=2, activations=kept, **config)
    assert differences(by_hand(LLAMA, 2), outcome) == []


@pytest.mark.parametrize("kept", ["device", "host", "nvme"])
@pytest.mark.parametrize("build", [with_dropout, lambda: small_t5(dropout=0.1)], ids=["gpt2", "t5"])
@pytest.mark.usefixtures("small_pages")
def test_dropout_in_one_slice_is_that_of_checkpointing(build: Callable[[], nn.Module], kept: str, nvme: Path) -> None:
    """One slice is the whole batch: its masks are those of the whole batch's dropout."""
    recipe = Recipe(build=build, loss=padded_loss, num_steps=3)
    checkpointed = train_plain(replace(recipe, prepare=in_slices_by_hand(BATCH)))
    assert differences(checkpointed, train_offloaded(recipe, activations=kept, nvme_paths=[nvme])) == []


@pytest.mark.parametrize("build", [with_dropout, lambda: small_t5(dropout=0.1)], ids=["gpt2", "t5"])
def test_dropout_in_slices_is_that_of_checkpointed_slices(build: Callable[[], nn.Module]) -> None:
    """Slices draw one after the other, so whole-batch dropout has other masks, of the same distribution."""
    recipe = Recipe(build=build, loss=padded_loss, num_steps=3)
    by_checkpoints = train_plain(replace(recipe, prepare=in_slices_by_hand(2)))
    assert differences(by_checkpoints, train_offloaded(recipe, micro_batch_size=2)) == []
    assert differences(by_checkpoints, train_plain(recipe)) != []


@pytest.mark.parametrize("name", ["evaluation", "generation", "frozen"])
def test_between_and_beside(name: str) -> None:
    changes: dict[str, Any] = {
        "evaluation": {"between": evaluate},
        "generation": {"between": generate},
        "frozen": {"prepare": freeze},
    }[name]
    recipe = replace(LLAMA, num_steps=4, **changes)

    def prepare(model: nn.Module) -> None:
        recipe.prepare(model)
        in_slices_by_hand(2)(model)

    assert differences(train_plain(replace(recipe, prepare=prepare)), train_offloaded(recipe, micro_batch_size=2)) == []


def in_float64(model: nn.Module) -> nn.Module:
    # Grouped products of experts are for fewer bits.
    model.config._experts_implementation = "eager"
    return model.double()


def slice_one_by_one(model: nn.Module) -> None:
    """Without a run: whatever a block keeps, autograd keeps."""
    slicing = Slicing(micro_batch_size=1, declared={}, accelerator=CpuAccelerator(), between_slices=lambda: None)
    for unit in find_units(model, "auto"):
        if unit.is_block:
            SlicedBlock(unit.name, unit.module, slicing, lambda _: KeptByAutograd()).install()


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_ordinary_accumulation_in_float64(family: str) -> None:
    """The same mathematics: what differs is rounding. In float64 that is 2^-53 an operation, and no sum here has more
    than 2^12 terms; gradients are compared beside the model's largest, because some are zero but for rounding."""
    model = in_float64(FAMILIES[family]["build"]())
    inputs = inputs_of(family)
    for start in range(0, BATCH, 2):
        part = {name: value[start : start + 2] for name, value in inputs.items()}
        (model(**part, **EXTRA.get(family, {})).loss / 2).backward()
    ordinary = {name: param.grad for name, param in model.named_parameters()}
    bound = 2.0**-41 * max(float(grad.abs().max()) for grad in ordinary.values() if grad is not None)
    model.zero_grad()
    slice_one_by_one(model)
    model(**inputs, **EXTRA.get(family, {})).loss.backward()
    for name, param in model.named_parameters():
        expected = ordinary[name]
        if expected is None:
            assert param.grad is None
            continue
        assert param.grad is not None, name
        assert float((param.grad - expected).abs().max()) <= bound, name


EXTRA: dict[str, dict[str, Any]] = {family: {"use_cache": False} for family in ("llama", "gpt2", "t5", "mixtral")}


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    """Every sample has as many labels, so that the mean of micro-batches' means is the mean."""
    tokens = batch(0, 0).view(BATCH, LENGTH)
    if family == "vit":
        generator = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).double(), "labels": tokens[:, 0] % 2}
    mask = torch.ones_like(tokens)
    mask[0, 4:] = mask[3, 4:] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def test_router_losses_are_of_the_whole_batch() -> None:
    """Recorded router logits are joined, and their gradient reaches the routers."""
    model = in_float64(small_mixtral())
    inputs = inputs_of("mixtral") | {"output_router_logits": True, "use_cache": False}
    found = []
    for sliced in (False, True):
        if sliced:
            slice_one_by_one(model)
        output = model(**inputs)
        output.aux_loss.backward()
        output.aux_loss = output.aux_loss.detach()
        found.append((output, [layer.mlp.gate.weight.grad for layer in model.model.layers]))
        model.zero_grad()
    (whole, whole_grads), (joined, joined_grads) = found
    assert [logits.shape for logits in joined.router_logits] == [logits.shape for logits in whole.router_logits]
    for one, other in zip((whole.aux_loss, *whole_grads), (joined.aux_loss, *joined_grads), strict=True):
        assert float(one.abs().max()) > 0
        assert float((one - other).abs().max()) <= 2.0**-41 * float(one.abs().max())


@pytest.mark.usefixtures("small_chunks")
def test_parameters_are_read_as_often_in_eight_slices_as_in_one(nvme: Path) -> None:
    recipe = Recipe(loss=tiny_batch_loss, num_steps=3, num_micro_steps=1)
    config: dict[str, Any] = {"params": "nvme", "optimizer": "host", "gradients": "host", "nvme_paths": [nvme]}
    config |= {"update": "after_backward", "activation_memory": {"device": "1MiB"}}
    read = {}
    for size in (8, 1):
        least = least_memory(recipe, None, "device_memory", micro_batch_size=size, **config)
        report = train_offloaded(recipe, micro_batch_size=size, device_memory=least, **config).report
        assert report is not None
        # From files, and from where the update has left them in memory.
        read[size] = report.bytes_moved["nvme_read"] + report.bytes_moved["copy_in"]
    assert read[1] == read[8] > 0


INPUT_NBYTES = BATCH * LENGTH * 32 * 4
NUM_BLOCKS = 2


def up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize("kept", TIERS)
def test_leased_activations_are_the_formula(kept: str, nvme: Path, small_pages: int, *, on_device: bool) -> None:
    """As in docs/micro_batches.md."""
    recipe = replace(LLAMA, loss=padded_loss, num_steps=2)
    homes = dict.fromkeys(("params", "optimizer", "gradients"), "device")
    config = homes | {"nvme_paths": [nvme], "micro_batch_size": 1, "activations": kept}
    if on_device:
        with simulated() as environment:
            report = train_offloaded(recipe, environment, **config).report
    else:
        report = train_offloaded(recipe, **config).report
    assert report is not None
    pages = NUM_BLOCKS * up(INPUT_NBYTES, small_pages)
    buffer = up(INPUT_NBYTES, PAGE) + on_device * ROUNDING
    if kept == "device" or (kept == "host" and not on_device):
        expected = {kept: NUM_BLOCKS * INPUT_NBYTES}
    else:
        expected = {kept: pages, "device": 2 * buffer}
    if not on_device:
        expected["host"] = expected.get("host", 0) + expected.get("device", 0)
    for tier in report.tiers:
        assert tier.peak_bytes - tier.planned_bytes == expected.get(tier.name, 0), tier.name


PAGE, ROUNDING = 4096, 512


@pytest.mark.parametrize("kept", ["device", "nvme"])
@pytest.mark.usefixtures("small_pages")
def test_memory_set_aside_is_enough_where_nothing_else_is_left(kept: str, nvme: Path) -> None:
    on_host = {"optimizer": "host", "gradients": "host"}
    config: dict[str, Any] = {
        "params": "nvme",
        **on_host,
        "nvme_paths": [nvme],
        "micro_batch_size": 1,
        "activations": kept,
    }
    needed = (
        {"nvme": NUM_BLOCKS * PAGE, "device": 2 * PAGE} if kept == "nvme" else {"device": NUM_BLOCKS * INPUT_NBYTES}
    )
    least = least_memory(LLAMA, None, "device_memory", activation_memory=needed, **config)
    outcome = train_offloaded(LLAMA, device_memory=least, activation_memory=needed, **config)
    assert differences(by_hand(LLAMA, 1), outcome) == []
    missing = needed | {"device": needed["device"] - 1}
    with pytest.raises(zo.BudgetError, match=r'block inputs needs .*activation_memory=\{"device"'):
        train_offloaded(LLAMA, device_memory=least - 1, activation_memory=missing, **config)


@pytest.mark.usefixtures("small_pages")
def test_pages_are_used_again_whatever_the_length(nvme: Path) -> None:
    """Batches of several lengths, and forwards that no backward follows."""
    model = offload_prepared(LLAMA, activations="nvme", nvme_paths=[nvme])
    optimizer = zo.AdamW(model.parameters())
    peaks = []
    for length in (6, 12, 3, 12, 6, 12):
        tokens = batch(0, length).view(-1)[:12].repeat(2)[: 2 * length].view(2, length)
        language_loss(model, tokens)
        language_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(zo.step_report(model).tiers[2].peak_bytes)
    assert peaks[1] == peaks[-1]
    zo.close(model)


def test_inputs_that_went_away_leave_no_memory_behind(nvme: Path) -> None:
    model = offload_prepared(LLAMA, activations="nvme", nvme_paths=[nvme])
    inputs: list[weakref.ref[torch.Tensor]] = []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = language_loss(model, batch(0, 0))
    assert [ref() for ref in inputs] == [None] * NUM_BLOCKS
    loss.backward()
    zo.close(model)


def test_a_second_backward_through_what_was_sent_away_is_refused(nvme: Path) -> None:
    model = offload_prepared(LLAMA, activations="nvme", nvme_paths=[nvme])
    loss = language_loss(model, batch(0, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(zo.ConfigError, match="second backward through the same graph"):
        loss.backward()
    zo.close(model)


def refused(recipe: Recipe, words: str, **config: Any) -> None:
    """In the first forward, and the model is an ordinary one afterwards."""
    model = offload_prepared(recipe, **config)
    with pytest.raises(zo.ConfigError, match=words):
        recipe.loss(model, batch(0, 0))
    zo.close(model)
    recipe.loss(model, batch(0, 0)).backward()


def with_cache(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=True).loss
    return loss


def as_long_as_wide(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(1, 17).view(4, 4) + tokens[0, 0] % 2
    mask = torch.arange(4) < torch.tensor([[4], [3], [2], [4]])
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, attention_mask=mask.long(), use_cache=False).loss
    return loss


def normed_over_the_batch() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = tokens.float()
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden.square().mean()

    torch.manual_seed(15)
    return Net()


def test_misuse_is_refused_in_the_first_forward_with_the_argument() -> None:
    refused(LLAMA, r"model\.layers\.0: argument hidden_states has 4 samples.*micro_batch_size=3", micro_batch_size=3)
    refused(replace(LLAMA, loss=with_cache), "argument cache is a DynamicCache.*use_cache=False", micro_batch_size=1)
    refused(
        replace(LLAMA, loss=as_long_as_wide),
        r"argument attention_mask of shape \(4, 1, 4, 4\) may be a part of the batch or not",
        micro_batch_size=2,
    )
    refused(
        replace(LLAMA, prepare=with_checkpointing(use_reentrant=False)),
        "has gradient checkpointing",
        micro_batch_size=2,
    )
    refused(
        Recipe(build=normed_over_the_batch, loss=lambda model, tokens: model(tokens)),
        r"layers\.0 has a BatchNorm1d",
        micro_batch_size=1,
    )


def test_declared_rules_are_used() -> None:
    recipe = replace(LLAMA, loss=as_long_as_wide)
    rules = {"attention_mask": "batch", "position_ids": "batch", "model.layers.*:position_embeddings": "batch"}
    outcome = train_offloaded(recipe, micro_batch_size=2, slice_rules=rules)
    assert differences(by_hand(recipe, 2), outcome) == []


def test_settings_that_fit_no_block_are_refused_before_anything_is_allocated(nvme: Path) -> None:
    for words, config in (
        (r"activations for 'nosuch\.\*': no block", {"activations": {"nosuch.*": "host"}}),
        (r"slice_rules for 'nosuch\.\*:mask'", {"micro_batch_size": 1, "slice_rules": {"nosuch.*:mask": "batch"}}),
        (
            r"unit model\.layers\.0\.mlp lies inside unit model\.layers\.0",
            {"micro_batch_size": 1, "units": ["model.layers.?", "*.mlp"]},
        ),
        ("activations go to nvme, but nvme_paths is empty", {"activations": "nvme", "nvme_paths": []}),
    ):
        with pytest.raises(zo.ConfigError, match=words):
            offload_prepared(LLAMA, **{"nvme_paths": [nvme], **config})


def test_each_unit_as_it_is_said(nvme: Path) -> None:
    choice = {"model.layers.0": "keep", "model.layers.1": "nvme"}
    outcome = train_offloaded(LLAMA, activations=choice, nvme_paths=[nvme])
    assert differences(train_plain(LLAMA), outcome) == []
    assert outcome.report is not None
    assert outcome.report.bytes_moved["nvme_written"] == 2 * PAGE


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.usefixtures("small_pages")
def test_an_io_error_is_raised_and_the_step_can_be_tried_again(operation: str, nvme: Path, *, on_device: bool) -> None:
    recipe = Recipe(num_steps=2, num_micro_steps=1, max_norm=None)
    plain = train_plain(recipe)
    for at in range(4):
        fault = Fault(at=at, operation=operation, files="scratch.bin")
        with ExitStack() as stack:
            if on_device:
                environment = stack.enter_context(simulated(faults=[fault]))
            else:
                environment = cpu_with_simulated_drive(faults=[fault])
            model = offload_prepared(recipe, environment, activations="nvme", nvme_paths=[nvme])
            stack.callback(zo.close, model)
            optimizer = zo.AdamW(model.parameters(), lr=recipe.learning_rate, **recipe.options)
            num_errors = 0
            for step in range(recipe.num_steps):
                while True:
                    try:
                        recipe.loss(model, batch(step, 0)).backward()
                        break
                    except zo.TierIOError:
                        num_errors += 1
                        assert num_errors < 5
                        optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
            assert num_errors == 1
            outcome = Outcome(params=current_params(model))
        assert differences(Outcome(params=plain.params), outcome) == []
