from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerooffload.planner.activations import ActivationForecast, predict_activation_bytes
from zerooffload.planner.byteless import StorageTracker, let_gradients_go

BATCH, WIDTH, HIDDEN = 32, 8, 16


class OneLayer(nn.Module):
    """y = x W^T, and a loss that keeps nothing but its own scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.linear(batch).sum()


def test_one_layer_is_its_batch_its_output_and_one_gradient() -> None:
    # forward keeps: the batch [32, 8], the 0-dim loss; the output [32, 16] lives until it is summed.
    # backward: d loss is a 0-dim one, the output's gradient is an expanded view of it, and W's gradient [16, 8] is the
    # product of its transpose with the batch.
    forecast = predict_activation_bytes(OneLayer, lambda model: model(torch.ones(BATCH, WIDTH)))
    batch, output = BATCH * WIDTH * 4, BATCH * HIDDEN * 4
    assert forecast.saved_bytes == batch + 4
    assert forecast.peak_bytes == batch + output + 4


def test_a_model_may_be_converted_when_it_is_built() -> None:
    forecast = predict_activation_bytes(
        lambda: OneLayer().to(torch.bfloat16), lambda model: model(torch.ones(BATCH, WIDTH, dtype=torch.bfloat16))
    )
    assert forecast.saved_bytes == BATCH * WIDTH * 2 + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_keep_their_operands(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, WIDTH, HIDDEN, dtype=dtype))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([8, 8, 24, BATCH], dtype=torch.int32)
            return torch._grouped_mm(batch, self.weight, offs=ends).mul(2).sum()

    forecast = predict_activation_bytes(Experts, lambda model: model(torch.ones(BATCH, WIDTH, dtype=dtype)))
    # The batch, where each expert's rows end, and the loss.
    assert forecast.saved_bytes == BATCH * WIDTH * dtype.itemsize + 4 * 4 + dtype.itemsize


class Chain(nn.Module):
    """Squares in a row; each keeps its input [numel]."""

    def __init__(self, length: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.length = length
        self.recompute = recompute

    def block(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            value = value * value
        return value

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        value = batch * self.scale
        for _ in range(self.length):
            value = checkpoint(self.block, value, use_reentrant=False) if self.recompute else self.block(value)
        return value.sum()


def run_chain(numel: int) -> object:
    return lambda model: model(torch.ones(numel))


def test_what_autograd_saves_counts_and_recomputation_saves_it() -> None:
    numel, length = 1000, 5
    kept = predict_activation_bytes(lambda: Chain(length), run_chain(numel))
    # The batch, and the input of each of the 20 squares; the loss.
    assert kept.saved_bytes == (1 + 4 * length) * numel * 4 + 4
    recomputed = predict_activation_bytes(lambda: Chain(length, recompute=True), run_chain(numel))
    # The batch, and the input of each of the 5 blocks.
    assert recomputed.saved_bytes == (1 + length) * numel * 4 + 4
    assert recomputed.peak_bytes < kept.peak_bytes


def test_gradients_at_rest_do_not_count() -> None:
    class Tall(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(depth))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return batch.sum()

    def peak(depth: int) -> int:
        return predict_activation_bytes(lambda: Tall(depth), lambda model: model(torch.ones(1, 64))).peak_bytes

    # A layer more keeps one more input [1, 64], and neither its weight nor its gradient [64, 64] on top of it.
    assert peak(7) - peak(6) == 64 * 4


def test_a_tied_weights_parts_live_until_they_are_joined() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(512, 32)
            self.head = nn.Linear(32, 512, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens)).sum()

    forecast = predict_activation_bytes(Tied, lambda model: model(torch.zeros(1, 1, dtype=torch.int64)))
    weight = 512 * 32 * 4
    # The head's gradient waits for the embedding's: two at once, whatever the sum adds.
    assert 2 * weight <= forecast.peak_bytes < 4 * weight


def test_ways_that_hang_on_integers_are_taken_as_in_the_real_run() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            values = self.linear(torch.ones(4))
            positions = torch.arange(len(tokens))
            return values.repeat(1000).sum() if (positions == tokens).all() else values.sum()

    def peak(tokens: list[int]) -> int:
        return predict_activation_bytes(Deciding, lambda model: model(torch.tensor(tokens))).peak_bytes

    assert peak([0, 1, 2]) > 16_000 > peak([2, 1, 0])


def test_a_model_that_decides_by_computed_values_cannot_be_foretold() -> None:
    class Routing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            values = self.linear(batch)
            return values.sum() if values.sum() > 0 else values.mean()

    with pytest.raises(RuntimeError):
        predict_activation_bytes(Routing, lambda model: model(torch.ones(1, 4)))


def test_the_forecast_leaves_random_numbers_alone_and_repeats() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = predict_activation_bytes(OneLayer, lambda model: model(torch.randn(4, WIDTH)))
    assert torch.equal(torch.rand(1), expected)
    assert first == predict_activation_bytes(OneLayer, lambda model: model(torch.randn(4, WIDTH)))
    assert isinstance(first, ActivationForecast)


def test_it_equals_what_the_tensors_of_a_real_run_take() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    tokens = torch.zeros(2, 24, dtype=torch.int64)

    def step(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten())

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tracker.made(result)
            return result

    forecast = predict_activation_bytes(lambda: transformers.LlamaForCausalLM(config), step)
    model = transformers.LlamaForCausalLM(config)
    let_gradients_go(model)
    tracker = StorageTracker()
    with Watching():
        tracker.begin(model)
        loss = step(model)
        saved_bytes = tracker.live_bytes
        loss.backward()
    assert (forecast.peak_bytes, forecast.saved_bytes) == (tracker.peak_bytes, saved_bytes)
