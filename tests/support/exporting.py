"""Exports by one rank or several; in a module that spawned processes can import."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.rank_stages import Case
from support.rank_training import OPTIONS, even_shares, global_batch, offload_config
from support.small_models import small_llama
from support.stored_weights import read_weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import zerooffload as zo
from zerooffload.checkpoint import weights_writer
from zerooffload.errors import ZeroOffloadError
from zerooffload.formats import MIB
from zerooffload.planner import placement
from zerooffload.runtime import weight_export

NVME = ("nvme", "nvme", "nvme")


def partly_frozen() -> nn.Module:
    """With a buffer."""
    model = small_llama()
    model.get_submodule("model.layers.0").requires_grad_(requires_grad=False)
    model.register_buffer("counts", torch.arange(7))
    return model


def export_in_stages(
    rank: int, world_size: int, folder: str, cases: Sequence[Case], num_replicas: int = 1
) -> list[str]:
    """What is not as `state_dict` says, after a step; by stage and homes."""
    placement.CHUNK_NUMEL = 4096
    weight_export._PIECE_NUMEL = 1000
    mesh = init_device_mesh("cpu", (num_replicas, world_size // num_replicas))
    wrong: list[str] = []
    for number, (stage, homes) in enumerate(cases):
        model = partly_frozen()
        config = offload_config(folder, homes, stage=stage, compute_dtype="bf16")
        zo.offload(model, config, process_group=mesh if num_replicas > 1 else None)
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        even_shares(world_size)[rank].loss(model, global_batch(0, 0)).backward()
        optimizer.step()
        out = Path(folder) / f"out-{number}"
        zo.export_safetensors(model, out, max_shard_size="20kB")
        expected = model.state_dict()
        found = read_weights(out)
        same = {name for name, tensor in found.items() if torch.equal(tensor, expected[name])}
        if same != expected.keys() - {"lm_head.weight"}:
            wrong.append(f"{stage} {homes}: {sorted(expected.keys() - same)}")
        zo.close(model)
    return wrong


def fail_on_one_rank(rank: int, world_size: int, folder: str) -> tuple[str, list[str]]:
    """What each rank is told when the last one's drive is full, and what is left; then they export all the same."""
    model = partly_frozen()
    zo.offload(model, offload_config(folder, ("host", "host", "host")))
    write_all = weights_writer._write_all
    if rank == world_size - 1:
        weights_writer._write_all = _full
    try:
        zo.export_safetensors(model, Path(folder) / "out")
    except ZeroOffloadError as error:
        told = f"{type(error).__name__}: {error}"
    weights_writer._write_all = write_all
    torch.distributed.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    torch.distributed.barrier()
    zo.export_safetensors(model, Path(folder) / "out")
    zo.close(model)
    return told, left


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def measure(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """Peaks of the process, in bytes, of a model whose states exceed the budget of all ranks together five times."""
    torch.set_num_threads(1)
    placement.CHUNK_NUMEL = 1 << 17
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 4000}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    budget = 40 * MIB
    zo.offload(
        model, offload_config(folder, NVME, host_memory=budget // world_size, device_memory=budget // world_size)
    )
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    tokens = torch.arange(16).view(1, 16) + rank
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = peak_nbytes()
    out = Path(folder) / "out"
    result = {
        "trained": trained,
        "states": 16 * sum(param.numel() for param in model.parameters()),
        "budget": budget,
    }
    zo.export_safetensors(model, out, dtype=torch.float32, max_shard_size="20MB")
    result["exported"] = peak_nbytes()
    result["weights"] = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    zo.save_dcp(Path(folder) / "dcp", model, optimizer)
    result["saved"] = peak_nbytes()
    zo.load_dcp(Path(folder) / "dcp", model, optimizer)
    result["loaded"] = peak_nbytes()
    zo.close(model)
    return result


def peak_nbytes() -> int:
    """The most that was resident."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def export(folder: str, seed: int) -> None:
    """By one rank, over what is there; other values for another seed."""
    model = small_llama(seed=seed)
    zo.offload(model, offload_config(folder, ("host", "host", "host")))
    zo.export_safetensors(model, Path(folder) / "out", max_shard_size="20kB", overwrite=True)
    zo.close(model)


def export_until_killed(  # noqa: PLR0917 - arguments of ranks have places
    rank: int,  # noqa: ARG001
    world_size: int,  # noqa: ARG001
    folder: str,
    seed: int,
    call: str,
    number: int,
) -> None:
    """End the process at the `number`-th call of a function of `os`, before it does anything."""
    real, calls = getattr(os, call), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, call, counted)
    export(folder, seed)
