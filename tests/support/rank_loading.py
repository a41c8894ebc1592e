"""Ranks that load a model's folder; in a module that spawned processes can import."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.stored_weights import bytes_read, elements_read, states_of
from transformers import AutoModelForCausalLM

import zerooffload as zo
from zerooffload import CheckpointError
from zerooffload.checkpoint.safetensors_file import SafetensorsFile
from zerooffload.train.process import give_freed_memory_back, resident_bytes_trimmed, warm_up

CHUNK_NUMEL = 1 << 19
HOST_MEMORY = 88 << 20

_ON_NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}


def _config(nvme: str, **fields: Any) -> zo.OffloadConfig:
    bounds = {"host_memory": "64MiB", "nvme_space": "64MiB", "nvme_paths": [nvme], "threads": 1, "overwrite": True}
    return zo.OffloadConfig(**{**_ON_NVME, **bounds, **fields})


def load(rank: int, world_size: int, folder: str, nvme: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is read, in ranges of elements and in bytes; and the states, beside those of the model in memory."""
    del rank, world_size
    config = _config(nvme, **fields)
    with elements_read() as ranges, bytes_read(Path(folder)) as reads:
        model = zo.load_pretrained(folder, config)
    states = states_of(model)
    in_memory = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    expected = states_of(zo.offload(in_memory, config))
    return {"ranges": ranges, "bytes": sum(reads), "states": states, "expected": expected}


def fail_on_one(rank: int, world_size: int, folders: list[str], nvme: str, *, while_reading: bool) -> str:
    """How loading ends where one rank has other files, or can no longer read them."""
    del world_size
    read = SafetensorsFile.read

    def failing(self: SafetensorsFile, name: str, first: int, target: torch.Tensor) -> None:
        if rank == 1 and while_reading and "layers.1" in name:
            raise CheckpointError(f"cannot read tensor {name}")
        read(self, name, first, target)

    with mock.patch.object(SafetensorsFile, "read", failing):
        try:
            zo.load_pretrained(folders[rank], _config(nvme))
        except zo.ZeroOffloadError as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


def peaks(rank: int, world_size: int, folder: str, small_folder: str, nvme: str, compute_dtype: str) -> dict[str, int]:  # noqa: PLR0917 - arguments of ranks have places
    """By how much resident memory grows at its peak, while a model is loaded and while it trains."""
    del rank, world_size
    give_freed_memory_back()
    warm_up()
    config = _config(nvme, host_memory=HOST_MEMORY, nvme_space="4GiB", compute_dtype=compute_dtype)
    with mock.patch("zerooffload.planner.placement.CHUNK_NUMEL", CHUNK_NUMEL):
        # What is loaded once is there before.
        small = zo.load_pretrained(small_folder, config)
        _train(small)
        zo.close(small)
        del small
        baseline = resident_bytes_trimmed()
        _forget_peak()
        model = zo.load_pretrained(folder, config)
        loading = _peak_bytes() - baseline
        gc.collect()
        _forget_peak()
        _train(model)
        training = _peak_bytes() - baseline
        zo.close(model)
    return {"loading": loading, "training": training}


def _train(model: Any) -> None:
    optimizer = zo.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.arange(32)[None]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _forget_peak() -> None:
    """Let VmHWM begin again at what is resident now: proc(5)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
