"""Resuming on ranks whose files are not equally new; in a module that spawned processes can import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.environments import Homes, simulated_devices
from support.rank_training import (
    NUM_MICRO_STEPS,
    OPTIONS,
    even_shares,
    global_batch,
    offload_config,
    whole_params,
)
from support.small_models import small_gpt2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerooffload as zo

NUM_STEPS = 4


@dataclass(frozen=True)
class Setup:
    """How the run is offloaded, at first and when it is resumed."""

    homes: Homes = ("nvme", "nvme", "host")
    stages: tuple[int, int] = (3, 3)
    durable: bool = False
    num_replicas: int = 1


def train_damage_resume(  # noqa: PLR0917 - arguments of ranks have places
    rank: int, world_size: int, folder: str, damage: str, damaged_rank: int, setup: Setup
) -> dict[str, Any]:
    """A few steps, damage to one rank's newest record, and the same steps again from where `zo.resume` begins."""
    mesh = init_device_mesh("cpu", (setup.num_replicas, world_size // setup.num_replicas))
    ranks = mesh if setup.num_replicas > 1 else None
    moments, losses = [], []
    model, optimizer, scheduler = _begin(folder, setup, setup.stages[0], ranks)
    assert zo.resume(model, optimizer) == 0
    for step in range(NUM_STEPS):
        losses.append(_step(model, optimizer, scheduler, step, even_shares(world_size)[rank]))
        moments.append(_moment(model, optimizer))
    zo.close(model)
    dist.barrier()
    if rank == damaged_rank:
        _damage(Path(folder) / "zerooffload" / f"rank-{rank:05d}" / f"record-{NUM_STEPS % 2}.bin", damage)
    dist.barrier()
    model, optimizer, scheduler = _begin(folder, setup, setup.stages[1], ranks)
    resumed = zo.resume(model, optimizer)
    _check_same(_moment(model, optimizer), moments[resumed - 1])
    for step in range(resumed, NUM_STEPS):
        assert _step(model, optimizer, scheduler, step, even_shares(world_size)[rank]) == losses[step]
        _check_same(_moment(model, optimizer), moments[step])
    zo.close(model)
    dist.barrier()
    model, optimizer, _ = _begin(folder, setup, setup.stages[1], ranks)
    again = zo.resume(model, optimizer)
    _check_same(_moment(model, optimizer), moments[again - 1])
    zo.close(model)
    return {"resumed": resumed, "again": again}


def resume_on_devices(rank: int, world_size: int, folder: str, setup: Setup) -> dict[str, Any]:
    """The same on simulated devices with memory of their own, where rank 1's newest record is torn."""
    with simulated_devices(on_files=True):
        return train_damage_resume(rank, world_size, folder, "torn", 1, setup)


def refused_to_resume(rank: int, world_size: int, folder: str, setup: Setup) -> str:
    """What is said to a run of another stage in the same folder."""
    model, optimizer, scheduler = _begin(folder, setup, setup.stages[0], None)
    assert zo.resume(model, optimizer) == 0
    _step(model, optimizer, scheduler, 0, even_shares(world_size)[rank])
    zo.close(model)
    dist.barrier()
    try:
        _begin(folder, setup, setup.stages[1], None)
    except zo.ConfigError as error:
        return str(error)
    return "accepted"


def _begin(folder: str, setup: Setup, stage: int, ranks: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = small_gpt2()
    config = offload_config(folder, setup.homes, stage=stage, durable=setup.durable, overwrite=False)
    zo.offload(model, config, process_group=ranks)
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    zo.track(model, scheduler=scheduler)
    return model, optimizer, scheduler


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int, share: Any) -> list[float]:
    losses = []
    for micro_step in range(NUM_MICRO_STEPS):
        loss = share.loss(model, global_batch(step, micro_step))
        (loss / NUM_MICRO_STEPS).backward()
        losses.append(loss.item())
    zo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return losses


def _moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    return {
        "params": whole_params(model),
        "states": {(key, name): value for key, entry in state["state"].items() for name, value in entry.items()},
        "rate": state["param_groups"][0]["lr"],
    }


def _check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["rate"] == other["rate"]
    for kind in ("params", "states"):
        assert one[kind].keys() == other[kind].keys()
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())


def _damage(path: Path, damage: str) -> None:
    if damage == "removed":
        path.unlink()
    elif damage == "torn":
        content = path.read_bytes()
        path.write_bytes(content[:4096] + bytes(len(content) - 4096))
    elif damage == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        assert damage == "none"
