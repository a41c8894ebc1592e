"""Models that train in milliseconds: random weights, the same every time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

VOCABULARY = 128
_LENGTH = 12


def small_llama(*, tied: bool = True, seed: int = 7) -> nn.Module:
    """Two blocks of 9,280 parameters, the head tied to the embedding or not."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config)


def small_mixtral(*, seed: int = 13) -> nn.Module:
    """Two blocks of four packed experts."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )
    return MixtralForCausalLM(config)


def small_gpt2(dropout: float = 0.0) -> nn.Module:
    """Two blocks of 12,704 parameters, the head tied to the embedding."""
    torch.manual_seed(8)
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": small_llama, "gpt2": small_gpt2}


def batch(step: int, micro_step: int) -> torch.Tensor:
    """Token ids `[2, 12]`, another at each (micro-)step."""
    generator = torch.Generator().manual_seed(1000 * step + micro_step)
    return torch.randint(1, VOCABULARY, (2, _LENGTH), generator=generator)


class Branching(nn.Module):
    """Blocks of which the second is only used in every other call, and then twice, and a frozen vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(32), requires_grad=False)
        self.num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        self.num_calls += 1
        for number, block in enumerate(self.blocks):
            for _ in range(1 if number != 1 else 2 * (self.num_calls % 4 < 2)):
                hidden = hidden + block(hidden) + self.shift
        logits = self.head(self.scale * hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Halves(nn.Module):
    """A block of two layers, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, hidden: torch.Tensor, which: int) -> torch.Tensor:
        """Of the same shape."""
        return hidden + self.halves[which](hidden).tanh()


class HalfUsed(nn.Module):
    """A backward gives gradients to one half of each block's flat buffer, the next one to the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.blocks = nn.ModuleList(Halves() for _ in range(2))
        self.num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, (self.num_calls + number) % 2)
        self.num_calls += 1
        logits = hidden @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def half_used() -> nn.Module:
    """A `HalfUsed`, the same every time."""
    torch.manual_seed(10)
    return HalfUsed()


def branching() -> nn.Module:
    """A `Branching`, the same every time."""
    torch.manual_seed(9)
    return Branching()
