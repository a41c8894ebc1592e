"""A model on the meta device gets the values that building it in memory with the same seed would have given."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.folders import leftovers
from torch import nn

import zerooffload as zo
from zerooffload.runtime.initialization import materialize, player
from zerooffload.runtime.initialization.modes import recording
from zerooffload.runtime.initialization.tape import Tape, default_dtype

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
WIDE = {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64}
DECODER = {**WIDE, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 64, "bos_token_id": 1}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96}
OPT = {**SIZES, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
VIT = {**SIZES, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
QWEN_MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
LONG_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}

Build = Callable[[], nn.Module]


def of(kind: str, head: str = "ForCausalLM", *, model: dict[str, Any] | None = None, **config: Any) -> Build:
    """Builds a Hugging Face model as `from_config` does."""
    settings = getattr(hf, f"{kind}Config")(**config)
    return lambda: getattr(hf, f"{kind}{head}")._from_config(settings, **(model or {}))


class Between(nn.Module):
    """A module between two others that draw: it must take its numbers, and leave the next ones."""

    def __init__(self, *builds: Build) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.between = nn.ModuleList(build() for build in builds)
        self.after = nn.Linear(3, 3)


class Skewed(nn.Linear):
    """Initialisers that do nothing on meta, or draw as long as values are out of bounds."""

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.trunc_normal_(self.bias, std=0.5, a=-0.5, b=0.5)


class Sparse(nn.Linear):
    """Draws in many small pieces, and writes to parts of a tensor."""

    def reset_parameters(self) -> None:
        nn.init.sparse_(self.weight, 0.5)
        with torch.no_grad():
            self.bias.copy_(torch.bernoulli(torch.rand(self.bias.shape)))


class Rotated(nn.Linear):
    """Results that lie in another way on meta, and normal numbers that do not lie in a row."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight.t())
        with torch.no_grad():
            self.bias.copy_(torch.linalg.svd(torch.randn(self.weight.shape)).Vh[0, 0])
            self.weight.copy_(torch.linalg.svd(torch.randn(self.weight.shape), full_matrices=False).Vh[:1])


class Whole(nn.Module):
    """A container that initialises its modules itself, and then has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("unused", torch.empty(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.1)
        nn.init.uniform_(self.scale)
        self.table.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]) ** 2)


class Wrapped(nn.Module):
    """A Hugging Face model in a module of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.body = of("Bert", "Model", **WIDE)()
        self.head = nn.Linear(32, 4)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16))


def transformer() -> nn.Module:
    return Between(encoder, lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True))


def layers() -> nn.Module:
    return Between(
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3)),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.PReLU()),
        lambda: nn.Sequential(nn.Embedding(9, 3, padding_idx=2), nn.EmbeddingBag(9, 3), nn.Bilinear(2, 3, 4)),
        lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 30, [5, 10]),
    )


def recurrent() -> nn.Module:
    return Between(
        lambda: nn.LSTM(8, 8, 2, bidirectional=True, proj_size=4), lambda: nn.GRU(8, 8), lambda: nn.LSTMCell(8, 8)
    )


def attention() -> nn.Module:
    return Between(
        lambda: nn.MultiheadAttention(16, 2), lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=4, add_bias_kv=True)
    )


BF16 = {"dtype": torch.bfloat16}
MODELS: dict[str, Build] = {
    "llama": of("Llama", **DECODER),
    "llama, tied": of("Llama", **DECODER, tie_word_embeddings=True),
    "llama, long": of("Llama", **DECODER, rope_parameters=LONG_ROPE),
    "llama in bf16": of("Llama", **DECODER, model=BF16),
    "llama to bf16": lambda: of("Llama", **DECODER)().to(torch.bfloat16),
    "gpt2": of("GPT2", "LMHeadModel", **GPT2, eos_token_id=2),
    "t5": of("T5", "ForConditionalGeneration", **T5),
    "t5, untied": of("T5", "ForConditionalGeneration", **T5, tie_word_embeddings=False),
    "opt": of("OPT", **OPT),
    "neox": of("GPTNeoX", **WIDE),
    "qwen2": of("Qwen2", **DECODER),
    "qwen3": of("Qwen3", **DECODER, head_dim=16),
    "gemma": of("Gemma", **DECODER, head_dim=16),
    "gemma2": of("Gemma2", **DECODER, head_dim=16),
    "phi": of("Phi", **DECODER),
    "mistral": of("Mistral", **DECODER),
    "mixtral": of("Mixtral", **DECODER, num_local_experts=4),
    "qwen2 moe": of("Qwen2Moe", **DECODER, **QWEN_MOE, num_experts_per_tok=2),
    "bert": of("Bert", "ForMaskedLM", **WIDE),
    "roberta": of("Roberta", "ForSequenceClassification", **WIDE),
    "vit": of("ViT", "ForImageClassification", **VIT),
    "vit in bf16": of("ViT", "ForImageClassification", **VIT, model=BF16),
    "mamba": of("Mamba", hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4, pad_token_id=0),
    "wrapped bert": Wrapped,
    "transformer": transformer,
    "attention": attention,
    "recurrent": recurrent,
    "layers": layers,
    "initialisers": lambda: Between(
        lambda: Skewed(5, 7), lambda: Skewed(7, 5), lambda: Sparse(5, 7), lambda: Rotated(7, 5)
    ),
    "container": lambda: Between(Whole, Whole),
}
NAMES = list(MODELS)


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def fill(model: nn.Module, groups: Iterable[Sequence[nn.Parameter]] | None = None) -> None:
    for _ in materialize(model, CPU, groups or [[param] for param in model.parameters()]):
        pass


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    mine, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert list(mine) == list(theirs)
    mine_too, theirs_too = dict(model.named_buffers()), dict(expected.named_buffers())
    assert list(mine_too) == list(theirs_too)
    for name, tensor in {**mine, **mine_too}.items():
        reference = {**theirs, **theirs_too}[name]
        assert (tensor.dtype, tensor.stride()) == (reference.dtype, reference.stride()), name
        assert torch.equal(tensor, reference), name


@pytest.mark.parametrize("name", NAMES)
def test_the_values_are_those_of_a_model_built_in_memory(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(7)
    expected = MODELS[name]()
    state = torch.get_rng_state()
    model = on_meta(MODELS[name])
    params = list(model.parameters())
    torch.manual_seed(7)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        fill(model)
    assert_same(model, expected)
    assert all(mine is before for mine, before in zip(model.parameters(), params, strict=True))
    # What is drawn next is the same, too.
    assert torch.equal(torch.get_rng_state(), state)
    assert not caplog.records


@pytest.mark.parametrize("piece_numel", [32, 1 << 18])
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "transformer", "recurrent", "initialisers", "container"])
def test_no_other_order_changes_them(name: str, piece_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "PIECE_NUMEL", piece_numel)
    torch.manual_seed(7)
    expected = MODELS[name]()
    state = torch.get_rng_state()
    model = on_meta(MODELS[name])
    order = torch.randperm(len(list(model.parameters())), generator=torch.Generator().manual_seed(3)).tolist()
    params = list(model.parameters())
    torch.manual_seed(7)
    fill(model, [[params[index]] for index in order])
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 97, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("draw", [nn.init.normal_, nn.init.uniform_])
def test_drawing_in_pieces_takes_as_much(
    draw: Callable[[torch.Tensor], object], dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "PIECE_NUMEL", 32)
    tape = Tape()
    with recording(tape):
        draw(torch.empty(numel, dtype=dtype))
    (operation,) = tape.operations
    assert player.draws_one_an_element(operation)
    torch.manual_seed(1)
    draw(torch.empty(numel, dtype=dtype))
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    player.draw_in_pieces(operation, CPU)
    assert torch.equal(torch.get_rng_state(), expected)


def test_an_operation_is_played_in_its_default_dtype() -> None:
    tape = Tape()
    with default_dtype(torch.bfloat16), recording(tape):
        place = tape.place(torch.rand(20))
    torch.manual_seed(7)
    values = player.Player(tape, [place], CPU).tensor(place)
    torch.manual_seed(7)
    assert torch.equal(values, torch.rand(20, dtype=torch.bfloat16))


@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama in bf16", "transformer"])
def test_offloading_is_that_of_the_model_in_memory(
    name: str, compute_dtype: str | None, offload: Callable[..., nn.Module]
) -> None:
    results = []
    for build in (MODELS[name], lambda: on_meta(MODELS[name])):
        torch.manual_seed(7)
        model = offload(build(), "nvme", compute_dtype=compute_dtype)
        optimizer = zo.AdamW(model.parameters(), lr=1e-3)
        with zo.full_params(model, grads=True):
            before = [param.clone() for param in model.parameters()]
            # The master of a bf16 parameter shows in what a step makes of it.
            for param in model.parameters():
                param.grad = torch.full_like(param, 1e-3)
        optimizer.step()
        with zo.full_params(model, writeback=False):
            results.append([*before, *(param.clone() for param in model.parameters()), *model.buffers()])
        zo.close(model)
    for expected, mine in zip(*results, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


def test_a_recurrent_layer_works_with_its_values() -> None:
    torch.manual_seed(7)
    expected = nn.LSTM(4, 4)
    model = on_meta(lambda: nn.LSTM(4, 4))
    torch.manual_seed(7)
    fill(model)
    inputs = torch.ones(2, 1, 4)
    assert torch.equal(model(inputs)[0], expected(inputs)[0])
    assert [reference() for reference in model._flat_weight_refs] == list(model.parameters())


class Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3)
        self.head = nn.Linear(3, 9)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(3, 3)


def resized() -> nn.Module:
    model = of("Llama", **DECODER)()
    model.model.layers = model.model.layers[:1]
    return model


class Forgetful(hf.PreTrainedModel):
    """A parameter whose values are what was in memory."""

    def __init__(self, config: hf.PretrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.post_init()


WAV = {"conv_dim": [8], "conv_stride": [2], "conv_kernel": [3], "num_conv_pos_embedding_groups": 2}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Applies, "constructor of Applies uses apply"),
        (Tied, "head.weight is taken to have been tied to embed.weight"),
        (resized, r"LlamaForCausalLM is not what its class makes of its config: it has model\.norm"),
        (lambda: hf.BertModel(hf.BertConfig(**WIDE), add_pooling_layer=False), "should have pooler"),
        (lambda: Forgetful(hf.PretrainedConfig()), "scale gets no values from its constructor, so it is zero"),
    ],
    ids=["applies", "tied", "changed", "arguments", "forgotten"],
)
def test_where_it_may_differ_a_warning_says_so(build: Build, words: str, caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta(build)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        fill(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    (record,) = caplog.records
    assert "may differ from those of a model built in memory" in record.getMessage()
    assert re.search(words, record.getMessage())


def wav2vec2() -> nn.Module:
    """A parameter that is in memory under any device."""
    return of("Wav2Vec2", "Model", **SIZES, **WAV, num_conv_pos_embeddings=4)()


def a_layer_in_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Whole())
    for module in (model[1], model[2].layers[1]):
        module.to_empty(device="cpu")
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    return model


@pytest.mark.parametrize(
    ("build", "warning"),
    [
        (wav2vec2, "masked_spec_embed is in memory already and keeps its values"),
        (a_layer_in_memory, "1.weight is in memory already and keeps its values (as are 3 other parameters)"),
    ],
)
def test_what_is_in_memory_stays(build: Build, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta(build)
    before = {name: (param, param.clone()) for name, param in model.named_parameters() if not param.is_meta}
    with caplog.at_level(logging.WARNING, "zerooffload"):
        fill(model)
    assert warning in caplog.text
    for name, (param, values) in before.items():
        assert model.get_parameter(name) is param
        assert torch.equal(param, values)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_what_draws_in_memory_while_it_is_recorded_does_not_disturb() -> None:
    torch.manual_seed(7)
    expected = dict(wav2vec2().named_parameters())
    model = on_meta(wav2vec2)
    torch.manual_seed(7)
    fill(model)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]) or name == "masked_spec_embed"


def test_a_buffer_of_two_modules_stays_one() -> None:
    model = on_meta(lambda: nn.Sequential(Whole(), Whole()))
    model[1].table = model[0].table
    fill(model)
    assert model[1].table is model[0].table


def test_a_tie_to_the_first_is_right() -> None:
    torch.manual_seed(7)
    expected = Tied()
    model = on_meta(Tied)
    torch.manual_seed(7)
    fill(model)
    assert_same(model, expected)
    assert model.head.weight is model.embed.weight


class Bare(nn.Module):
    """A parameter that its constructor draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3)
        self.scale = nn.Parameter(torch.randn(3))


class Incomplete(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Looking(nn.Linear):
    def reset_parameters(self) -> None:
        if float(self.weight.sum()) > 0:
            nn.init.ones_(self.weight)


class Replacing(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.ones(self.weight.shape))
        nn.init.ones_(self.bias)


class Private(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(3))
        nn.init.ones_(self.bias)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            Bare,
            r"Bare is on the meta device and has neither reset_parameters.*\(scale\)\. Define a reset_parameters\(\)",
        ),
        (
            lambda: Between(lambda: Incomplete(3, 3)),
            r"between\.0 \(Incomplete\).*bias gets no values",
        ),
        (lambda: with_reset_on_meta(Looking), r"1 \(Looking\).*reset_parameters\(\) fails there: .*meta"),
        (lambda: Between(lambda: Replacing(3, 3)), r"between\.0 \(Replacing\).*makes new parameters"),
        (lambda: Between(lambda: Private(3, 3)), r"between\.0 \(Private\).*a generator of its own"),
        (
            lambda: Between(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
            r"between\.0\.parametrizations\.weight.*has neither reset_parameters",
        ),
    ],
    ids=["bare parameter", "incomplete", "looks at values", "replaces", "own generator", "parametrized"],
)
def test_what_cannot_be_initialised_is_refused_and_the_model_is_as_it_was(
    build: Build, words: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_meta(build)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    classes = [type(module) for module in model.modules()]
    state = torch.get_rng_state()
    config = zo.OffloadConfig(
        params="nvme", optimizer="nvme", gradients="nvme", nvme_paths=nvme, host_memory="32MiB", threads=1
    )
    for _ in range(2):
        with pytest.raises(zo.ConfigError, match=words):
            zo.offload(model, config)
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert list(after) == list(before)
        assert all(tensor is before[name] and tensor.is_meta for name, tensor in after.items())
        assert [type(module) for module in model.modules()] == classes
        assert torch.equal(torch.get_rng_state(), state)
        assert leftovers(nvme) == []
    if build is Bare:
        monkeypatch.setattr(Bare, "reset_parameters", lambda self: nn.init.ones_(self.scale), raising=False)
        zo.offload(model, config)
        with zo.full_params(model, writeback=False):
            assert torch.equal(model.scale, torch.ones(3))
        zo.close(model)


def with_reset_on_meta(kind: type[nn.Linear]) -> nn.Module:
    """A module whose constructor would fail on meta as its `reset_parameters` does."""
    late = nn.Linear(3, 3)
    late.__class__ = kind
    return nn.Sequential(nn.Linear(3, 3), late)


class Marked(nn.Parameter):
    """A user's own kind of parameter."""


def marked() -> nn.Module:
    """Parameters with all that a user can hang on them: a kind, attributes, a flag, a tie."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight = Marked(model[0].weight)
    model[0].weight.rate = [0.5]
    model[1].weight.requires_grad_(False)
    model[2].weight = model[0].weight
    return model


def test_what_a_user_hung_on_parameters_and_modules_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta(marked)
    rate, called = model[0].weight.rate, []
    model[1].register_forward_hook(lambda *_: called.append("module"))
    with caplog.at_level(logging.ERROR, "zerooffload"):
        fill(model)
    assert type(model[0].weight) is Marked
    assert model[0].weight.rate is rate
    assert model[2].weight is model[0].weight
    assert [param.requires_grad for param in model.parameters()] == [True, True, False, True, True]
    model(torch.ones(3)).sum().backward()
    assert called == ["module"]


Seen = list[tuple[str, torch.Tensor]]


def hook_everything(model: nn.Module, seen: Seen) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that see gradients, that change them, and that are taken away: what may be removed later."""

    def note(name: str) -> Callable[[torch.Tensor], None]:
        return lambda grad: seen.append((name, grad.clone()))

    def note_sum(name: str) -> Callable[[torch.Tensor], None]:
        return lambda param: seen.append((name, param.grad.clone()))

    handles = []
    for name, param in model.named_parameters():
        param.register_hook(note(f"removed from {name}")).remove()
        handles.append(param.register_hook(note(f"first of {name}")))
        param.register_hook(lambda grad: grad * 3)
        param.register_hook(note(f"last of {name}"))
        param.register_post_accumulate_grad_hook(note_sum(f"sum of {name}"))
    return handles


@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_hooks_on_parameters_run_as_on_those_of_a_model_in_memory(
    tier: str, compute_dtype: str | None, offload: Callable[..., nn.Module]
) -> None:
    results = []
    for build in (Tied, lambda: on_meta(Tied)):
        torch.manual_seed(7)
        model, seen = build(), []
        handles = hook_everything(model, seen)
        offload(model, tier, compute_dtype=compute_dtype)
        optimizer = zo.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model.last(model.embed(torch.arange(9))).square().sum().backward()
            optimizer.step()
            # Their owner may still take them away.
            for handle in handles:
                handle.remove()
        with zo.full_params(model, writeback=False):
            results.append([*seen, *((name, param.detach().clone()) for name, param in model.named_parameters())])
        zo.close(model)
    in_memory, from_meta = results
    names = [name for name, _ in in_memory]
    assert names.count("first of embed.weight") == 1
    assert names.count("last of embed.weight") == names.count("sum of embed.weight") == 2
    assert [name for name, _ in from_meta] == names
    assert all(torch.equal(mine, expected) for (_, mine), (_, expected) in zip(from_meta, in_memory, strict=True))


def test_hooks_on_a_frozen_parameter_wait_for_its_gradients() -> None:
    model, seen = on_meta(lambda: nn.Linear(3, 3)), []
    model.weight.register_hook(seen.append)
    model.weight.requires_grad_(False)
    fill(model)
    model.weight.requires_grad_(True)
    model(torch.ones(3)).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize(
    "refer",
    [
        weakref.ref,
        # DistributedDataParallel's way to see gradients: hooks of the node, which are not the parameter's.
        lambda param: torch.autograd.graph.get_gradient_edge(param).node,
        lambda param: param.t(),
    ],
    ids=["weak reference", "node that accumulates", "view"],
)
def test_who_refers_to_a_parameter_is_refused(refer: Callable[[nn.Parameter], object]) -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    reference = refer(model.bias if refer is weakref.ref else model.weight)
    with pytest.raises(zo.ConfigError, match=r"(weak reference|graph or view) .*parameter (weight|bias)"):
        fill(model)
    assert reference is not None
    assert model.weight.is_meta
    assert model.bias.is_meta
    del reference
    fill(model)
    assert not model.weight.is_meta
