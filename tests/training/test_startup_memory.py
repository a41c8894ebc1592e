"""Building, sharding and placing a meta model takes one unit and the staging ring above what the run holds anyway."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import zerooffload as zo
from zerooffload.formats import MIB
from zerooffload.runtime import initial_states
from zerooffload.runtime.initialization import materialize, player
from zerooffload.sharding.grouping import find_units

PIECE_NUMEL = 4096
SPLIT_NUMEL = 512
SPLIT_BYTES = 24 * SPLIT_NUMEL
"""What splitting that many masters into bf16 and remainder takes."""
GENERATOR_STATE_BYTES = 5056
ON_NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}

Build = Callable[[], nn.Module]


def llama(*, tied: bool) -> nn.Module:
    """The embedding (and head) as large as the rest."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=10, vocab_size=4000, **heads)
    )


def gpt2() -> nn.Module:
    """Its blocks draw in their constructors, and two matrices of each block are drawn a third time."""
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=12, n_head=2, vocab_size=800, n_positions=64))


def t5() -> nn.Module:
    """Two stacks that share the embedding."""
    return T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=32, d_ff=256, num_layers=6, num_heads=2, vocab_size=800, tie_word_embeddings=True)
    )


def vit() -> nn.Module:
    """Draws of which the values decide how many they are."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 2}
    return ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8))


class Copies(nn.Module):
    """Layers that are copies of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(800, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 256, batch_first=True), 12)


MODELS: dict[str, Build] = {
    "llama": lambda: llama(tied=False),
    "llama, tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "t5": t5,
    "vit": vit,
    "copies": Copies,
}
NAMES = list(MODELS)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def unit_nbytes(model: nn.Module) -> dict[str, int]:
    params = dict(model.named_parameters(remove_duplicate=False))
    return {unit.name: sum(params[names[0]].nbytes for names in unit.param_names) for unit in find_units(model, "auto")}


def peak_of_tensors(action: Callable[[], object]) -> int:
    """The most bytes that torch's allocator held beyond what it held before, from each allocation and release."""
    # What nobody needs must not be counted as given back.
    gc.collect()
    with profile(profile_memory=True) as recorded:
        action()
    held = peak = 0
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "PIECE_NUMEL", PIECE_NUMEL)


@pytest.fixture
def kept_states(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many states of the generator were kept at each draw, for tensors wanted later than their turn."""
    nums: list[int] = []
    take_turn = player.Player._take_turn

    def counted(self: player.Player, index: int) -> None:
        take_turn(self, index)
        nums.append(len(self._states))

    monkeypatch.setattr(player.Player, "_take_turn", counted)
    return nums


def temporaries(name: str, *, in_order: bool = True) -> int:
    """One parameter, where it is a copy of another, or drawn whole to be thrown away."""
    return 4 * 64 * 256 if name == "copies" or (name == "vit" and not in_order) else 0


def small_change(model: nn.Module, kept_states: list[int]) -> int:
    """A piece of draws, buffers as they are made, scalars, and states of the generator: the present one and those kept.

    Two parameters of a unit may not be drawn in a row, so the present one is taken twice.
    """
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return 4 * (PIECE_NUMEL + 15) + 2 * buffers + 4096 + (2 + max(kept_states)) * GENERATOR_STATE_BYTES


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_offloading_takes_one_unit(
    name: str, compute_dtype: str | None, nvme: Path, kept_states: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_states, "_PIECE_NUMEL", SPLIT_NUMEL)
    model = on_meta(name)
    units = unit_nbytes(model)
    config = zo.OffloadConfig(
        **ON_NVME,
        compute_dtype=compute_dtype,
        nvme_paths=[nvme],
        host_memory="64MiB",
        nvme_space="64MiB",
        threads=1,
    )
    peak = peak_of_tensors(lambda: zo.offload(model, config))
    bound = max(units.values()) + temporaries(name) + small_change(model, kept_states) + SPLIT_BYTES
    assert max(units.values()) <= peak <= bound
    # Or else the bound would say nothing.
    assert sum(units.values()) > 2 * bound
    zo.close(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "reversed"])
def test_any_group_alone_is_all_that_is_held(name: str, kept_states: list[int], *, is_reversed: bool) -> None:
    model = on_meta(name)
    params = dict(model.named_parameters(remove_duplicate=False))
    groups = [[params[names[0]] for names in unit.param_names] for unit in find_units(model, "auto")]
    groups = groups[::-1] if is_reversed else groups
    largest = max(sum(param.nbytes for param in group) for group in groups)

    def take() -> None:
        for group in leaving(model, groups):
            assert not any(param.is_meta for param in group)

    peak = peak_of_tensors(take)
    bound = largest + temporaries(name, in_order=not is_reversed) + small_change(model, kept_states)
    assert largest <= peak <= bound


def leaving(model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> Iterator[Sequence[nn.Parameter]]:
    """The groups, whose values are gone when the next is wanted."""
    filled = iter(groups)
    for _ in materialize(model, torch.device("cpu"), groups):
        group = next(filled)
        yield group
        for param in group:
            param.data = torch.empty(0)


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import zerooffload as zo

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

def offload(**sizes):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes))
    homes = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
    return zo.offload(model, zo.OffloadConfig(
        **homes, compute_dtype=sys.argv[2], nvme_paths=[sys.argv[1]], host_memory="1GiB", threads=1))

# What is loaded once is there before.
zo.close(offload(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64))
before = kib("VmHWM")
model = offload(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, vocab_size=32000)
nbytes = 4 * sum(param.numel() for param in model.parameters())
result = {"grown": 1024 * (kib("VmHWM") - before), "left": 1024 * (kib("VmRSS") - before), "nbytes": nbytes}
zo.close(model)
print(json.dumps(result))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell")
@pytest.mark.parametrize(
    ("dtype", "state_bytes", "grad_bytes", "rest"),
    [("fp32", 16, 4, 16 * MIB), ("bf16", 14, 2, 24 * MIB)],
    ids=["fp32", "bf16"],
)
def test_a_process_grows_by_one_unit_and_the_ring(
    dtype: str, state_bytes: int, grad_bytes: int, rest: int, nvme: Path
) -> None:
    """The rest is the run's own bookkeeping, and what the allocator keeps: more where small temporaries lie between."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(nvme), dtype], capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    embedding = 4 * 32000 * 512
    ring = (4 * state_bytes + 2 * grad_bytes) * (1 << 21)
    assert result["left"] <= ring + rest
    assert result["grown"] <= embedding + ring + rest
    # All weights alone, without their optimizer states, would not have fitted.
    assert result["nbytes"] > 1.25 * (embedding + ring + rest)
