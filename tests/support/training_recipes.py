"""What is trained in the tests of training: loops of all kinds, and every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.reference_training import Recipe, language_loss, whole
from support.small_models import MODELS, batch, branching, small_gpt2
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def with_checkpointing(*, use_reentrant: bool) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        # Its name since transformers 5.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": use_reentrant})

    return prepare


def evaluate(model: nn.Module, step: int) -> list[float]:
    if step % 2:
        return []
    model.eval()
    with torch.no_grad():
        losses = [language_loss(model, batch(100 + step, number)).item() for number in range(2)]
    model.train()
    return losses


def generate(model: nn.Module, step: int) -> list[float]:
    if step % 3:
        return []
    model.eval()
    prompt = batch(200 + step, 0)[:, :4]
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False, use_cache=True
    )
    model.train()
    return [float(token) for token in tokens.flatten()]


def edit(model: nn.Module, step: int) -> list[float]:
    """Change some values by hand, and read others, through `full_params`."""
    block = model.get_submodule("model.layers")[step % 2]
    with whole(block), torch.no_grad():
        block.mlp.down_proj.weight.mul_(0.75)
        return [block.mlp.up_proj.weight.double().sum().item()]


def freeze(model: nn.Module) -> None:
    model.get_submodule("model.embed_tokens").requires_grad_(requires_grad=False)
    model.get_submodule("model.layers.0").requires_grad_(requires_grad=False)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, interleaved in every unit's buffer."""
    return [
        {"params": [param for param in model.parameters() if param.dim() > 1], "weight_decay": 0.3},
        {"params": [param for param in model.parameters() if param.dim() <= 1], "lr": 1e-2, "weight_decay": 0.0},
    ]


def first_block(model: nn.Module) -> list[nn.Parameter]:
    """An optimizer over a part of the model."""
    return [param for name, param in model.named_parameters() if "layers.0" in name]


def with_dropout() -> nn.Module:
    torch.manual_seed(10)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=64, eos_token_id=None)
    return GPT2LMHeadModel(config)


_CHANGES: dict[str, dict[str, Any]] = {
    "reentrant checkpointing": {"prepare": with_checkpointing(use_reentrant=True)},
    "checkpointing": {"prepare": with_checkpointing(use_reentrant=False)},
    "gpt2 checkpointing": {"build": small_gpt2, "prepare": with_checkpointing(use_reentrant=False)},
    "dropout": {"build": with_dropout},
    "dropout and checkpointing": {"build": with_dropout, "prepare": with_checkpointing(use_reentrant=False)},
    "evaluation": {"between": evaluate},
    "generation": {"between": generate},
    "edits": {"between": edit},
    "edits in bf16": {"between": edit, "compute_dtype": "bf16"},
    "frozen layers": {"prepare": freeze},
    "unused in a step": {"build": branching, "loss": lambda model, tokens: model(tokens), "num_micro_steps": 1},
    "unused in a micro-step": {"build": branching, "loss": lambda model, tokens: model(tokens), "num_micro_steps": 3},
    "two groups": {"groups": two_groups},
    "a part of the model": {"groups": first_block},
    "schedule": {"schedule": lambda step: 0.8**step},
    "never clips": {"max_norm": 1e9},
    "always clips": {"max_norm": 1e-3},
    "no clipping": {"max_norm": None},
    "one micro-step": {"num_micro_steps": 1},
    "four micro-steps": {"num_micro_steps": 4},
}
NUM_LOOP_STEPS = 7
LOOPS = {name: Recipe(num_steps=NUM_LOOP_STEPS, **changes) for name, changes in _CHANGES.items()}

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.99), "weight_decay": 0.1},
    "adam": {"betas": (0.9, 0.99), "weight_decay": 0.01},
    "adagrad": {"lr_decay": 0.01, "weight_decay": 0.01, "initial_accumulator_value": 0.1, "eps": 1e-10},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": False},
}


def optimizer_recipe(algorithm: str, moments: str = "fp32", dtype: str | None = None) -> Recipe:
    """Of the small Llama."""
    return Recipe(
        build=MODELS["llama"],
        num_steps=6,
        algorithm=algorithm,
        moments=moments,
        compute_dtype=dtype,
        options=OPTIONS[algorithm],
    )


OPTIMIZER_RECIPES = {
    **{(algorithm, "fp32", None): optimizer_recipe(algorithm) for algorithm in OPTIONS if algorithm != "adamw"},
    **{
        ("adamw", moments, dtype): optimizer_recipe("adamw", moments, dtype)
        for moments in ("bf16", "8bit")
        for dtype in (None, "bf16")
    },
    ("adamw", "fp32", "fp16"): optimizer_recipe("adamw", dtype="fp16"),
    ("lion", "8bit", "fp16"): optimizer_recipe("lion", "8bit", "fp16"),
    ("sgd", "bf16", "bf16"): optimizer_recipe("sgd", "bf16", "bf16"),
    ("adagrad", "8bit", None): optimizer_recipe("adagrad", "8bit"),
}
