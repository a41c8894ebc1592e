from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from zerooffload.errors import ConfigError
from zerooffload.planner.activations import predict_activation_bytes
from zerooffload.planner.byteless import let_gradients_go
from zerooffload.planner.profiles.model import ModelProfile, PassWork, UnitWork
from zerooffload.planner.tracing import LARGE_RESULT_NBYTES, _Trace, trace_model

BuildModel = Callable[[], nn.Module]
RunStep = Callable[[nn.Module], torch.Tensor]


def trace(build_model: BuildModel, run_step: RunStep, **settings: Any) -> ModelProfile:
    return trace_model(build_model, run_step, name="model", batch_size=1, **settings)


def unit(profile: ModelProfile, name: str) -> UnitWork:
    return next(unit for unit in profile.units if unit.name == name)


def flops_of(profile: ModelProfile, which: str) -> float:
    return sum(sum(getattr(unit, which).flops.values()) for unit in profile.units)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.blocks(batch).sum()


def test_each_figure_of_two_layers_by_hand() -> None:
    profile = trace_model(TwoLayers, lambda model: model(torch.ones(32, 8)), name="two", batch_size=32)
    first, second, root = profile.units
    batch, hidden, output, scalar = 32 * 8 * 4, 32 * 16 * 4, 32 * 4 * 4, 4
    assert first == UnitWork(
        name="blocks.0",
        forward=PassWork(flops={"fp32": 2 * 32 * 8 * 16}, num_operations=1),
        # The batch needs no gradient.
        backward=PassWork(flops={"fp32": 2 * 32 * 8 * 16}, num_operations=1),
        input_nbytes=batch,
        saved_nbytes=batch,
        forward_peak_nbytes=batch + hidden,
        # The gradients of the loss, which the caller holds, of the output and of the weight.
        backward_peak_nbytes=batch + scalar + hidden + 16 * 8 * 4,
    )
    assert second == UnitWork(
        name="blocks.1",
        forward=PassWork(flops={"fp32": 2 * 32 * 16 * 4}, num_operations=1),
        backward=PassWork(flops={"fp32": 2 * 2 * 32 * 16 * 4}, num_operations=2),
        input_nbytes=hidden,
        saved_nbytes=hidden,
        forward_peak_nbytes=hidden + output,
        # The gradient of the output is that of the loss, expanded; those of the weight and of the input.
        backward_peak_nbytes=hidden + scalar + 4 * 16 * 4 + hidden,
    )
    assert root == UnitWork(
        name="(root)",
        # The batch is made, and the output summed.
        forward=PassWork(memory_bytes=batch + output + scalar, num_operations=2),
        # The gradient of the loss is made, like the loss.
        backward=PassWork(memory_bytes=scalar, num_operations=1),
        input_nbytes=0,
        saved_nbytes=scalar,
        forward_peak_nbytes=batch,
        backward_peak_nbytes=2 * scalar,
    )
    assert (profile.name, profile.batch_size, profile.sequence_length) == ("two", 32, 1)
    assert profile.saved_nbytes == batch + hidden + scalar
    assert profile.peak_nbytes == batch + scalar + second.backward_peak_nbytes


def test_large_results_are_new_memory_in_the_pass_that_makes_them() -> None:
    num_rows = LARGE_RESULT_NBYTES // (16 * 4)

    def new_bytes(num_rows: int) -> list[tuple[float, float]]:
        profile = trace(TwoLayers, lambda model: model(torch.ones(num_rows, 8)))
        return [(unit.forward.new_bytes, unit.backward.new_bytes) for unit in profile.units]

    # What the first makes, and its gradient: all else is smaller.
    assert new_bytes(num_rows) == [(LARGE_RESULT_NBYTES, 0), (0, LARGE_RESULT_NBYTES), (0, 0)]
    assert new_bytes(num_rows - 1) == [(0, 0), (0, 0), (0, 0)]


LENGTH = 24
TOKENS = torch.zeros(2, LENGTH, dtype=torch.int64)


def language_step(model: nn.Module) -> torch.Tensor:
    return functional.cross_entropy(model(input_ids=TOKENS).logits.flatten(0, 1).float(), TOKENS.flatten())


def llama(**fields: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, **{"tie_word_embeddings": True, **fields},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def mixtral(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def t5_step(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, groups=32),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images).mean((-1, -2)))


def convolutional_step(model: nn.Module) -> torch.Tensor:
    return functional.cross_entropy(model(torch.ones(4, 3, 16, 16)), torch.zeros(4, dtype=torch.int64))


MODELS: dict[str, tuple[BuildModel, RunStep]] = {
    "llama": (llama, language_step),
    "gpt2": (gpt2, language_step),
    "mixtral": (mixtral, language_step),
    "mixtral in fp32": (lambda: mixtral(torch.float32), language_step),
    "t5": (t5, t5_step),
    "convolutional": (Convolutional, convolutional_step),
}


@functools.cache
def traced(name: str) -> ModelProfile:
    return trace(*MODELS[name])


class Watching(TorchDispatchMode):
    """A trace of a run with real tensors."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.trace.ran(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize("name", MODELS)
def test_a_run_with_real_tensors_takes_the_same_in_each_unit(name: str) -> None:
    build_model, run_step = MODELS[name]
    model, real = build_model(), _Trace("auto")
    let_gradients_go(model)
    real.built(model)
    with saved_tensors_hooks(real.saves, lambda tensor: tensor), Watching(real):
        loss = run_step(model)
        real.turned()
        loss.backward()
    profile = traced(name)
    assert profile.units == tuple(real.units())
    assert (profile.peak_nbytes, profile.saved_nbytes) == (real.tracker.peak_bytes, real.saved_nbytes)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_forecast_and_each_has_one_owner(name: str) -> None:
    profile, forecast = traced(name), predict_activation_bytes(*MODELS[name])
    assert (profile.peak_nbytes, profile.saved_nbytes) == (forecast.peak_bytes, forecast.saved_bytes)
    assert sum(unit.saved_nbytes for unit in profile.units) == profile.saved_nbytes
    peaks = [peak for unit in profile.units for peak in (unit.forward_peak_nbytes, unit.backward_peak_nbytes)]
    assert max(peaks) <= profile.peak_nbytes <= profile.saved_nbytes + max(peaks)


def matmul_numel(model: nn.Module) -> int:
    """Parameters in matrix products, the tied head's once."""
    head = model.get_output_embeddings().weight.numel()
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return head + sum(param.numel() for param in blocks.parameters() if param.dim() == 2)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_products_of_language_models_are_those_of_the_closed_formula(name: str) -> None:
    profile = traced(name)
    batch, width, num_layers, pairs = len(TOKENS), 32, 3, LENGTH * (LENGTH + 1) // 2
    linear = 2 * matmul_numel(MODELS[name][0]()) * TOKENS.numel()
    # Scores and values in forward; in backward their four gradients, and the scores again.
    product = 2 * num_layers * batch * width * pairs
    assert flops_of(profile, "forward") == linear + 2 * product
    assert flops_of(profile, "backward") == 2 * linear + 5 * product
    assert all(set(unit.forward.flops) <= {"fp32"} for unit in profile.units)


def test_a_peak_is_a_units_and_what_others_have_saved() -> None:
    # The largest is the loss's backward, in the root, while every block's activations are there.
    profile = traced("llama")
    root = profile.units[-1]
    assert profile.peak_nbytes == root.backward_peak_nbytes + profile.saved_nbytes - root.saved_nbytes


def test_blocks_are_alike_and_in_order() -> None:
    profile = traced("llama")
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert [unit.name for unit in profile.units] == ["model.embed_tokens", *blocks, "lm_head", "(root)"]
    first, second, third = (unit(profile, name) for name in blocks)
    assert first.forward == second.forward == third.forward
    assert first.backward == second.backward == third.backward
    assert first.saved_nbytes == second.saved_nbytes == third.saved_nbytes
    assert second.input_nbytes == third.input_nbytes == 4 * 32 * TOKENS.numel()
    head = unit(profile, "lm_head")
    assert head.forward.flops == {"fp32": 2 * 300 * 32 * TOKENS.numel()}
    assert head.saved_nbytes == 4 * 32 * TOKENS.numel()


def test_products_of_a_convolutional_model_are_those_of_torchs_counter() -> None:
    profile = traced("convolutional")
    counter = FlopCounterMode(display=False)
    model = Convolutional()
    # Its formula for the gradient of a grouped weight knows no groups.
    model.blocks[4].weight.requires_grad_(False)
    with counter:
        convolutional_step(model).backward()
    weight_gradient = 2 * 4 * 32 * 9 * (3 - 2) ** 2
    total = flops_of(profile, "forward") + flops_of(profile, "backward")
    assert total == counter.get_total_flops() + weight_gradient


def test_bf16_counts_as_such_and_saves_less() -> None:
    halves, wholes = trace(lambda: llama().to(torch.bfloat16), language_step), traced("llama")
    for half, whole in zip(halves.units, wholes.units, strict=True):
        assert half.forward.flops == ({"bf16": whole.forward.flops["fp32"]} if whole.forward.flops else {})
    assert halves.saved_nbytes < wholes.saved_nbytes


def test_frozen_parameters_need_less() -> None:
    def frozen() -> nn.Module:
        model = llama()
        model.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(True)
        return model

    whole, part = traced("llama"), trace(frozen, language_step)
    assert [unit.forward for unit in part.units] == [unit.forward for unit in whole.units]
    # No gradient reaches the first block.
    assert unit(part, "model.layers.0").backward == PassWork()
    assert unit(part, "model.layers.0").saved_nbytes == 0
    # What is computed again keeps its input all the same.
    assert unit(part, "model.layers.1").input_nbytes == 4 * 32 * TOKENS.numel()
    third, third_of_whole = unit(part, "model.layers.2"), unit(whole, "model.layers.2")
    assert third.saved_nbytes < third_of_whole.saved_nbytes
    # Its weights' gradients fall away.
    numel = sum(param.numel() for param in llama().model.layers[2].parameters() if param.dim() == 2)
    assert third_of_whole.backward.flops["fp32"] - third.backward.flops["fp32"] == 2 * numel * TOKENS.numel()


def test_adapters_add_what_they_take() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        with warnings.catch_warnings():
            # peft asks transformers 5 by old names.
            warnings.simplefilter("ignore")
            return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))

    whole, part = traced("llama"), trace(adapted, language_step)
    num_layers, adapter = 3, 2 * (32 * 4 + 4 * 32) * TOKENS.numel()
    assert flops_of(part, "forward") - flops_of(whole, "forward") == num_layers * adapter
    assert flops_of(part, "backward") < flops_of(whole, "backward")
    assert part.saved_nbytes < whole.saved_nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_not_backwards_work(*, reentrant: bool) -> None:
    def checkpointed() -> nn.Module:
        model = llama()
        # transformers 5 renamed it, and warns about the old name.
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": reentrant})
        return model.train()

    kept, again = traced("llama"), trace(checkpointed, language_step)
    for one, other in zip(kept.units, again.units, strict=True):
        assert (one.name, one.forward) == (other.name, other.forward)
        assert one.backward.flops == other.backward.flops
        assert one.input_nbytes == other.input_nbytes
    # What blocks keep beside their inputs is gone.
    assert again.saved_nbytes < kept.saved_nbytes
    assert unit(again, "model.layers.1").saved_nbytes == unit(again, "model.layers.1").input_nbytes


def test_a_points_part_is_without_that_of_points_inside() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(8, 8, bias=False)
            self.inner = nn.Linear(8, 16, bias=False)
            self.after = nn.Linear(16, 8, bias=False)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.after(self.inner(self.before(batch)))

    def step(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(4, 8)).sum()

    profile = trace(lambda: nn.Sequential(nn.Linear(8, 8, bias=False), Outer()), step, units=["1", "1.inner"])
    assert [unit.name for unit in profile.units] == ["1", "1.inner", "(root)"]
    outer, inner, root = profile.units
    assert outer.forward.flops == {"fp32": 2 * 4 * (8 * 8 + 16 * 8)}
    assert inner.forward.flops == {"fp32": 2 * 4 * 8 * 16}
    assert root.forward.flops == {"fp32": 2 * 4 * 8 * 8}
    assert outer.backward.flops == {"fp32": 2 * 2 * 4 * (8 * 8 + 16 * 8)}
    assert inner.backward.flops == {"fp32": 2 * 2 * 4 * 8 * 16}
    assert (outer.input_nbytes, outer.saved_nbytes) == (4 * 8 * 4, 4 * (8 + 16) * 4)
    assert (inner.input_nbytes, inner.saved_nbytes) == (4 * 8 * 4, 4 * 8 * 4)


def test_a_module_that_is_called_twice_counts_twice_and_one_that_is_not_counts_nothing() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](self.blocks[2](self.blocks[0](batch))).sum()

    profile = trace(Twice, lambda model: model(torch.ones(4, 8, requires_grad=True)))
    assert [unit.name for unit in profile.units] == ["blocks.0", "blocks.2", "blocks.1", "(root)"]
    once = 2 * 4 * 8 * 8
    assert unit(profile, "blocks.0").forward.flops == {"fp32": 2 * once}
    assert unit(profile, "blocks.0").backward.flops == {"fp32": 4 * once}
    assert unit(profile, "blocks.0").input_nbytes == unit(profile, "blocks.0").saved_nbytes == 2 * 4 * 8 * 4
    assert unit(profile, "blocks.1") == UnitWork(
        name="blocks.1", forward=PassWork(), backward=PassWork(), input_nbytes=0, saved_nbytes=0,
        forward_peak_nbytes=0, backward_peak_nbytes=0,
    )  # fmt: skip


def test_what_several_points_keep_belongs_to_the_one_that_made_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(8, 8, bias=False)
            self.decoder = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            states = self.encoder(batch)
            return sum(layer(states) for layer in self.decoder).sum()

    profile = trace(Shared, lambda model: model(torch.ones(4, 8)), units=["encoder", "decoder.*"])
    assert {unit.name: unit.saved_nbytes for unit in profile.units} == {
        "encoder": 2 * 4 * 8 * 4, "decoder.0": 0, "decoder.1": 0, "(root)": 4,
    }  # fmt: skip
    assert [unit(profile, name).input_nbytes for name in ("decoder.0", "decoder.1")] == [4 * 8 * 4, 0]


def test_code_of_custom_functions_goes_with_their_points() -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(batch)
            return batch @ batch.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (batch,) = ctx.saved_tensors
            return gradient @ batch + gradient.t() @ batch

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return Tripled.apply(batch * self.scale)

    profile = trace(lambda: nn.Sequential(Block(), Block()), lambda model: model(torch.ones(4, 8)).sum())
    first, second, _ = profile.units
    assert (first.forward.flops, first.backward.flops) == ({"fp32": 2 * 4 * 8 * 4}, {"fp32": 2 * 2 * 4 * 4 * 8})
    assert (second.forward.flops, second.backward.flops) == ({"fp32": 2 * 4**3}, {"fp32": 2 * 2 * 4**3})


def test_a_model_that_decides_by_computed_values_is_refused() -> None:
    class Routing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            values = self.linear(batch)
            return values.sum() if values.sum() > 0 else values.mean()

    with pytest.raises(ConfigError, match="model cannot be traced without weights: its way depends on computed values"):
        trace(Routing, lambda model: model(torch.ones(1, 4)))


def test_a_device_that_is_not_here_is_told() -> None:
    with pytest.raises(ConfigError, match="device xpu:99, which is not here"):
        trace(TwoLayers, lambda model: model(torch.ones(32, 8)), device="xpu:99")


def test_units_that_match_nothing_are_told() -> None:
    with pytest.raises(ConfigError, match="matches no module"):
        trace(TwoLayers, lambda model: model(torch.ones(32, 8)), units=["none"])


def test_it_leaves_random_numbers_alone_and_repeats() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = trace(gpt2, language_step)
    assert torch.equal(torch.rand(1), expected)
    assert first == traced("gpt2")
