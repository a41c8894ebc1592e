"""Ranks load a model's folder: each its own part, all or none, and in the memory that they train in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.folders import leftovers
from support.rank_loading import HOST_MEMORY, fail_on_one, load, peaks
from support.ranks import run_ranks
from support.small_models import small_gpt2, small_llama, small_mixtral
from support.stored_weights import assert_same_states, save_folder
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

MODELS = {"gpt2": small_gpt2, "mixtral": small_mixtral}


def saved(folder: Path, model: Any, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    return folder


def elements(ranges: dict[str, list[tuple[int, int]]], name: str, numel: int) -> torch.Tensor:
    """How often each element of a tensor was read."""
    times = torch.zeros(numel, dtype=torch.int64)
    for first, stop in ranges.get(name, []):
        times[first:stop] += 1
    return times


@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_each_rank_reads_its_own_part_alone(name: str, compute_dtype: str | None, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", MODELS[name](), max_shard_size="30KB")
    (tmp_path / "nvme").mkdir()
    fields = {"compute_dtype": compute_dtype}
    results = run_ranks(load, 2, str(folder), str(tmp_path / "nvme"), fields)
    stored = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    # A bf16 parameter and the lower half of its master lie in different places, and each is made from what is stored.
    once = 2 if compute_dtype == "bf16" else 1
    total = 0
    for key, tensor in stored.items():
        first, second = (elements(result["ranges"], key, tensor.numel()) for result in results)
        assert set((first + second).tolist()) == {once}, key
        assert not (first * second).any(), key
        total += once * tensor.nbytes
    headers = sum(int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))
    assert sum(result["bytes"] - headers for result in results) == total
    for result in results:
        assert_same_states(result["states"], result["expected"])
    assert leftovers(tmp_path / "nvme") == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_has_the_values(stage: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", small_mixtral())
    (tmp_path / "nvme").mkdir()
    for result in run_ranks(load, 2, str(folder), str(tmp_path / "nvme"), {"stage": stage, "compute_dtype": "bf16"}):
        assert_same_states(result["states"], result["expected"])


@pytest.mark.parametrize("while_reading", [False, True])
def test_all_ranks_load_or_none(tmp_path: Path, *, while_reading: bool) -> None:
    folders = [saved(tmp_path / str(rank), small_llama()) for rank in range(2)]
    (tmp_path / "nvme").mkdir()
    if not while_reading:
        (folders[1] / "model.safetensors").unlink()
    fail = partial(fail_on_one, while_reading=while_reading)
    whole, failed = run_ranks(fail, 2, [str(folder) for folder in folders], str(tmp_path / "nvme"))
    what = "cannot read tensor model.layers.1" if while_reading else "holds no safetensors weights"
    assert failed.startswith("CheckpointError")
    assert what in failed
    assert whole.startswith("RankError")
    assert "rank 1" in whole
    assert what in whole
    assert leftovers(tmp_path / "nvme") == []


def llama(layers: int, width: int, vocab_size: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=vocab_size, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model whose weights alone are larger than what its training may take, and a small one."""
    made = {}
    for name, sizes in {"large": (16, 512, 8000), "small": (1, 64, 64)}.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        with torch.device("meta"):
            model: Any = llama(*sizes)
        model.config.save_pretrained(folder)
        shapes = {key: tensor.shape for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
        generator = torch.Generator().manual_seed(1)
        tensors = {key: 0.02 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        save_folder(folder, tensors, num_files=3)
    return made


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell")
@pytest.mark.parametrize(("world_size", "compute_dtype"), [(1, "bf16"), (2, "fp32")])
def test_loading_takes_the_memory_that_training_takes(
    world_size: int, compute_dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    paths = [str(folders["large"]), str(folders["small"]), str(tmp_path)]
    results = run_ranks(peaks, world_size, *paths, compute_dtype)
    weights_bytes = sum(file.stat().st_size for file in folders["large"].glob("*.safetensors"))
    # Parameters, their masters' lower halves, gradients and two moments.
    states_bytes = {"fp32": 16, "bf16": 14}[compute_dtype] * weights_bytes // 4
    assert states_bytes >= 5 * world_size * HOST_MEMORY
    for result in results:
        assert result["loading"] <= 1.05 * result["training"]
        # Or else the bound would say nothing.
        assert weights_bytes > 1.5 * result["training"]
    assert leftovers(tmp_path) == []
