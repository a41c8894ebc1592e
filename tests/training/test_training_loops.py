"""What people do in training loops, each on homes that need no moving, on a tight window, and on a simulated device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import least_memory, simulated
from support.folders import leftovers
from support.reference_training import Outcome, Recipe, differences, language_loss, train_offloaded, whole
from support.small_models import MODELS, batch, branching, small_gpt2
from transformers import GPT2Config, GPT2LMHeadModel

from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.optim.kernels import TorchKernels
from zerooffload.runtime.build import Environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.usefixtures("small_chunks")


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


NUM_STEPS = 7
LOOPS = {
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
RECIPES = {name: Recipe(num_steps=NUM_STEPS, **changes) for name, changes in LOOPS.items()}


@pytest.mark.parametrize("place", ["host", "tight", "simulated"])
@pytest.mark.parametrize("loop", RECIPES)
def test_loop(loop: str, place: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    recipe = RECIPES[loop]
    everywhere = "host" if place == "host" else "nvme"
    config: dict[str, Any] = dict.fromkeys(("params", "optimizer", "gradients"), everywhere)
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB", "device_memory": "16MiB"}
    with ExitStack() as stack:
        environment = stack.enter_context(simulated()) if place == "simulated" else None
        if place != "host":
            config["device_memory"] = least_memory(recipe, environment, "device_memory", **config)
        outcome = train_offloaded(recipe, environment, **config)
    assert differences(plain(recipe), outcome) == []


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_torch_kernels(model: str, dtype: str | None, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    """Without the native module the numbers are the same."""
    recipe = Recipe(build=MODELS[model], compute_dtype=dtype, num_steps=NUM_STEPS)
    environment = Environment(accelerator=CpuAccelerator(), open_engine=no_engine, kernels=TorchKernels())
    outcome = train_offloaded(recipe, environment, params="host", optimizer="host", gradients="host")
    assert differences(plain(recipe), outcome) == []
    assert leftovers(nvme) == []


def no_engine() -> Any:
    pytest.fail("an I/O engine was opened where nothing is on nvme")
