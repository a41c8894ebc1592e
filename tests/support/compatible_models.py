"""Kinds of models that people train, each in its smallest form, with the same values every time.

All losses take token ids `[2, 12]` as `small_models.batch` gives them; what is no language model makes its inputs of
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.eight_bits import EightBits
from support.reference_training import language_loss
from support.small_models import VOCABULARY, branching, half_used, small_gpt2, small_llama
from torch import nn
from torch.nn import functional

from zerooffload.runtime.hook_points import own_views_of_inputs
from zerooffload.sharding.grouping import find_units

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
_WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class KindOfModel:
    """A model of the table.

    Attributes
    ----------
    what : str
        For the page.
    build : callable
    loss : callable
    blocks : str or None
        The list of its blocks, if it has one: each can be compiled and checkpointed.
    is_language_model : bool
        Of transformers, so that it can generate.
    shares_inputs : bool
        Several blocks use one tensor. Its gradient is added up block by block, and so it is in plain PyTorch then.
    borrows : bool
        Modules use parameters of others, for which the least window has no room.
    differs_on_ranks : bool
        Batches decide which blocks are called, and each rank has its own.
    """

    what: str
    build: Callable[[], nn.Module]
    loss: Loss = language_loss
    blocks: str | None = None
    is_language_model: bool = False
    shares_inputs: bool = False
    borrows: bool = False
    differs_on_ranks: bool = False


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """With the same values every time."""

    def build() -> nn.Module:
        torch.manual_seed(11)
        return make()

    return build


def add_up_by_block(model: nn.Module) -> None:
    """In plain PyTorch, add up the gradients of what several blocks use as the package does."""
    for unit in find_units(model, "auto"):
        unit.module.register_forward_pre_hook(
            lambda _module, args, kwargs: own_views_of_inputs(args, kwargs)[:2], with_kwargs=True, prepend=True
        )


def forward_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of a model that returns its loss."""
    loss: torch.Tensor = model(tokens)
    return loss


def images(tokens: torch.Tensor, *shape: int) -> torch.Tensor:
    """Numbers about 0, `[2, *shape]`, made of token ids."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(tokens.shape[0], *shape, generator=generator)


# --- from transformers, built from a config --------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}


def from_config(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of transformers."""
    return seeded(lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)))


def translation_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of an encoder-decoder: the second half follows from the first."""
    loss: torch.Tensor = model(input_ids=tokens[:, :6], labels=tokens[:, 6:].contiguous(), use_cache=False).loss
    return loss


def masked_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of a masked language model."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def image_class_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of an image classifier of transformers."""
    loss: torch.Tensor = model(pixel_values=images(tokens, 3, 16, 16), labels=tokens[:, 0] % 4).loss
    return loss


# --- shapes of our own -----------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """A CNN with BatchNorm, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for width in (3, 8, 8)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = images(tokens, 3, 8, 8)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden.mean((2, 3))), tokens[:, 0] % 4)


class Denoiser(nn.Module):
    """The shape of a diffusion UNet: skip connections over several blocks, an embedding of time in each."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down = nn.ModuleList(Residual(width, 8) for width in (3, 8))
        self.middle = Residual(8, 8)
        self.up = nn.ModuleList(Residual(16, 8) for _ in range(2))
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        clean = images(tokens, 3, 8, 8)
        noise = clean.roll(1, 0)
        time = self.time(functional.one_hot(tokens[:, 0] % 8, 8).float())
        hidden, skipped = clean + noise, []
        for block in self.down:
            hidden = block(hidden, time)
            skipped.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden, time)
        for block in self.up:
            hidden = functional.interpolate(hidden, scale_factor=2)
            hidden = block(torch.cat([hidden, skipped.pop()], 1), time)
        return (self.out(hidden) - noise).square().mean()


class Residual(nn.Module):
    """Of a `Denoiser`."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width_in)
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.time = nn.Linear(16, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, hidden: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """`[batch, width, height, width]`."""
        hidden = self.first(functional.silu(self.norm(hidden)))
        return hidden + self.second(functional.silu(hidden + self.time(time)[:, :, None, None]))


class OddShapes(nn.Module):
    """Parameters without elements, with one, without dimensions, of odd lengths, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=number == 0) for number in range(3))
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        self.one = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.odd = nn.Parameter(torch.randn(3, 5, 7))
        self.register_buffer("kept", torch.zeros(7))
        self.register_buffer("not_kept", torch.arange(7.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens) + 0.01 * self.not_kept
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.one
        hidden = torch.cat([hidden.flatten(0, 1), self.nothing]) * self.scale
        with torch.no_grad():
            self.kept += hidden.mean(0)
            self.count += 1
        return (hidden @ self.odd.sum((0, 1))).square().mean() + (hidden - 0.1).abs().mean()


class Borrowing(nn.Module):
    """Blocks whose weights others use: the root computes with one, and each block with that before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = functional.embedding(tokens, self.embed.weight)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = functional.linear(hidden, self.blocks[0].weight, self.blocks[1].bias)
        logits = hidden @ self.embed.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Nested(nn.Module):
    """Lists in lists, one block that sits in two of them, and a depth that depends on the data, beyond the least."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        shared = nn.Linear(_WIDTH, _WIDTH)
        self.stages = nn.ModuleList(
            nn.ModuleList([nn.Linear(_WIDTH, _WIDTH), shared, nn.Linear(_WIDTH, _WIDTH)]) for _ in range(2)
        )
        self.head = nn.Linear(_WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for stage in self.stages:
            for layer in stage:
                hidden = hidden + torch.tanh(layer(hidden))
            for number, layer in enumerate(stage):
                for _ in range(int(tokens[0, number]) % 3):
                    hidden = hidden + torch.tanh(layer(hidden))
                if float(hidden.detach().mean()) > 0:
                    break
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Skipping(nn.Module):
    """A block that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.head = nn.Linear(_WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number != 1 or int(tokens[0, 4]) % 2:
                hidden = hidden + torch.tanh(block(hidden))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Experts(nn.Module):
    """A mixture of experts whose weights are packed in 3-D tensors, with a router in fp32."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, _WIDTH, 48) / 6)
        self.down = nn.Parameter(torch.randn(num_experts, 48, _WIDTH) / 7)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape; experts that no token chose are not computed."""
        flat = hidden.flatten(0, 1)
        weights = torch.softmax(self.router(flat.float()), -1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().squeeze(1)
            part = torch.relu(flat[rows] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, rows, (part * weights[rows, expert, None]).to(out.dtype))
        return hidden + out.view_as(hidden)


class ListedExperts(nn.Module):
    """The same, each expert a module of its own that is only called if a token chose it."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        flat = hidden.flatten(0, 1)
        weights = torch.softmax(self.router(flat), -1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().squeeze(1)
            part = self.experts[expert](flat[rows]) * weights[rows, expert, None]
            out = out.index_add(0, rows, part.to(out.dtype))
        return hidden + out.view_as(hidden)


class Stack(nn.Module):
    """An embedding, blocks that `make` makes, and a head."""

    def __init__(self, make: Callable[[], nn.Module], num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden.float()).to(hidden.dtype))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def in_bf16_but_norms_and_routers() -> nn.Module:
    """A bf16 model in which what is sensitive stays in fp32."""
    model = Stack(Experts).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
        if isinstance(module, Experts):
            module.router.float()
    return model


def mostly_frozen() -> nn.Module:
    """A Llama of which the head of each block and all norms are trained."""
    model = small_llama()
    for name, param in model.named_parameters():
        param.requires_grad_("down_proj" in name or "norm" in name)
    return model


def with_lora(base: nn.Module) -> nn.Module:
    """Adapters by `peft`; the base is frozen."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        # peft asks transformers 5 by old names, and says that torchao's weights cannot be merged: nobody does.
        warnings.simplefilter("ignore")
        model: nn.Module = get_peft_model(base, config)
    return model


class ByteLinear(nn.Module):
    """A frozen layer whose weight is bytes of 4-bit numbers, two in each, with a scale a row: the shape of QLoRA's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().to(torch.int8) + 8
        packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the layer."""
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1)
        return functional.linear(hidden, (codes.float() - 8) * self.scale)


class Adapted(nn.Module):
    """Frozen bytes with trained adapters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ByteLinear(nn.Linear(_WIDTH, _WIDTH, bias=False))
        self.down = nn.Linear(_WIDTH, 4, bias=False)
        self.up = nn.Linear(4, _WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return hidden + torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


def quantized_with_lora() -> nn.Module:
    """`peft` adapters on linear layers whose weights are `EightBits`."""
    base = small_llama()
    for module in base.get_submodule("model.layers").modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(EightBits.of(module.weight.detach()), requires_grad=False)
    return with_lora(base)


MODELS: dict[str, KindOfModel] = {
    "Llama": KindOfModel(what="tied embeddings", build=small_llama, blocks="model.layers", is_language_model=True),
    "Qwen": KindOfModel(
        what="Qwen3",
        build=from_config("Qwen3Config", "Qwen3ForCausalLM", **_SIZES, head_dim=16),
        blocks="model.layers",
        is_language_model=True,
    ),
    "Mistral": KindOfModel(
        what="sliding window of 8",
        build=from_config("MistralConfig", "MistralForCausalLM", **_SIZES, sliding_window=8, head_dim=16),
        blocks="model.layers",
        is_language_model=True,
    ),
    "Mixtral": KindOfModel(
        what="4 experts, packed",
        build=from_config("MixtralConfig", "MixtralForCausalLM", **_SIZES, num_local_experts=4),
        blocks="model.layers",
        is_language_model=True,
    ),
    "GPT-2": KindOfModel(what="tied embeddings", build=small_gpt2, blocks="transformer.h", is_language_model=True),
    "Gemma": KindOfModel(
        what="Gemma 2",
        build=from_config("Gemma2Config", "Gemma2ForCausalLM", **_SIZES, head_dim=16, query_pre_attn_scalar=16),
        blocks="model.layers",
        is_language_model=True,
    ),
    "T5": KindOfModel(
        what="encoder-decoder",
        build=from_config(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=_WIDTH,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        loss=translation_loss,
        blocks="encoder.block",
        shares_inputs=True,
        is_language_model=True,
    ),
    "BERT": KindOfModel(
        what="masked language model",
        build=from_config(
            "BertConfig",
            "BertForMaskedLM",
            **{**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
        loss=masked_loss,
        blocks="bert.encoder.layer",
    ),
    "ViT": KindOfModel(
        what="image classifier",
        build=from_config(
            "ViTConfig",
            "ViTForImageClassification",
            hidden_size=_WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
            num_labels=4,
        ),
        loss=image_class_loss,
        blocks="vit.layers",
    ),
    "CNN": KindOfModel(what="BatchNorm's buffers change", build=seeded(Convolutions), loss=forward_loss),
    "UNet": KindOfModel(what="skip connections over blocks", build=seeded(Denoiser), loss=forward_loss, blocks="down"),
    "partly frozen": KindOfModel(
        what="frozen and trained parameters in one block",
        build=mostly_frozen,
        blocks="model.layers",
        is_language_model=True,
    ),
    "LoRA": KindOfModel(
        what="`peft` on Llama",
        build=seeded(lambda: with_lora(small_llama())),
        blocks="base_model.model.model.layers",
        is_language_model=True,
    ),
    "bytes with adapters": KindOfModel(
        what="frozen `uint8` parameters", build=seeded(lambda: Stack(Adapted)), loss=forward_loss, blocks="blocks"
    ),
    "QLoRA": KindOfModel(
        what="`peft` on Llama with 8-bit weights of a tensor subclass",
        build=seeded(quantized_with_lora),
        blocks="base_model.model.model.layers",
        is_language_model=True,
    ),
    "branches": KindOfModel(
        what="a block unused in some steps, called twice in others", build=branching, loss=forward_loss, blocks="blocks"
    ),
    "halves": KindOfModel(
        what="half of each block unused in a step; a weight used outside of its module",
        build=half_used,
        loss=forward_loss,
        blocks="blocks",
        borrows=True,
    ),
    "nested": KindOfModel(
        what="shared blocks in nested lists; depth by the data", build=seeded(Nested), loss=forward_loss
    ),
    "skipped blocks": KindOfModel(
        what="a block that the data may leave out: other blocks on other ranks",
        build=seeded(Skipping),
        loss=forward_loss,
        blocks="blocks",
        differs_on_ranks=True,
    ),
    "borrowed weights": KindOfModel(
        what="parameters used outside of their module", build=seeded(Borrowing), loss=forward_loss, borrows=True
    ),
    "odd shapes": KindOfModel(
        what="no element, one element, no dimension, odd lengths; buffers",
        build=seeded(OddShapes),
        loss=forward_loss,
        blocks="blocks",
    ),
    "mixed precision": KindOfModel(
        what="bf16, norms and routers in fp32",
        build=seeded(in_bf16_but_norms_and_routers),
        loss=forward_loss,
        blocks="blocks",
    ),
    "packed experts": KindOfModel(
        what="3-D weights, uneven routing", build=seeded(lambda: Stack(Experts)), loss=forward_loss, blocks="blocks"
    ),
    "listed experts": KindOfModel(
        what="an expert without tokens is not called",
        build=seeded(lambda: Stack(ListedExperts)),
        loss=forward_loss,
        blocks="blocks",
    ),
}
