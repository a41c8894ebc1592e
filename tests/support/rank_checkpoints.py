"""Checkpoints of replicas and of pipelines; in a module that spawned processes can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.pipelines import Pipeline, PipelineCase, error_of, pipeline_mesh, whole_model
from support.rank_training import OPTIONS, even_shares, global_batch, offload_config, whole_params
from support.small_models import small_gpt2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerooffload as zo


def save_and_load_replicas(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Two replicas of two shards, then four shards: whether the states are the same, and how many steps are done."""
    replicas = init_device_mesh("cpu", (2, world_size // 2))
    model, optimizer = _offloaded(folder, replicas, ("host", "nvme", "host"), 3)
    for step in range(2):
        _step(model, optimizer, step, rank, world_size)
    ticket = zo.save(Path(folder, "checkpoints"), model, optimizer, {"rank": rank}, blocking=False)
    saved = _moment(model, optimizer)
    _step(model, optimizer, 2, rank, world_size)
    ticket.wait()
    zo.close(model)
    dist.barrier()
    model, optimizer = _offloaded(folder, None, ("host", "host", "host"), 2)
    extra = zo.load(Path(folder, "checkpoints"), model, optimizer)
    loaded = _moment(model, optimizer)
    zo.close(model)
    same = saved.keys() == loaded.keys() and all(torch.equal(value, loaded[name]) for name, value in saved.items())
    return {"same": same, "extra": extra, "folder": str(ticket.path)}


def save_and_load_pipelines(_rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A step, a save and another step; the same step again from the checkpoint; the parameters that were saved."""
    case = PipelineCase("1F1B", 2, 3, ("nvme", "nvme", "host"))
    first = Pipeline(world_size, str(Path(folder, "first")), case)
    first.step(0)
    path = zo.save(Path(folder, "checkpoints"), first.model, first.optimizer).path
    saved, norm = first.params(), first.step(1)
    after = first.params()
    first.close()
    second = Pipeline(world_size, str(Path(folder, "second")), case)
    zo.load(path, second.model, second.optimizer)
    is_same = second.step(1) == norm
    is_same &= all(torch.equal(value, after[name]) for name, value in second.params().items())
    second.close()
    return {"same": is_same, "saved": saved, "folder": str(path), "refused": _same_names(world_size, folder)}


def _same_names(world_size: int, folder: str) -> str:
    """What is said to stages whose parameters have the same names."""
    mesh = pipeline_mesh(world_size, 2)
    blocks = nn.Sequential(*whole_model()[:2])
    zo.offload(blocks, zo.OffloadConfig(threads=1), process_group=mesh["dp"], pipeline_group=mesh["pp"])
    said = error_of(lambda: zo.save(Path(folder, "others"), blocks, zo.AdamW(blocks.parameters())))
    zo.close(blocks)
    return said


def _offloaded(
    folder: str, ranks: DeviceMesh | None, homes: tuple[str, str, str], stage: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_gpt2()
    zo.offload(model, offload_config(folder, homes, stage=stage), process_group=ranks)
    return model, zo.AdamW(model.parameters(), **OPTIONS)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world_size: int) -> None:
    even_shares(world_size)[rank].loss(model, global_batch(step, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        **whole_params(model),
        **{f"{key}.{name}": value for key, entry in state.items() for name, value in entry.items()},
    }
