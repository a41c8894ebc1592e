"""A training that saves, may be killed while it does, and is continued from what it saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from support.killed import Kill, Log, Moments, WatchedEngine, log_path
from support.rank_training import OPTIONS, even_shares, global_batch, whole_params
from support.small_models import small_gpt2
from torch import nn

import zerooffload as zo
from zerooffload.accelerator import default_accelerator
from zerooffload.entry.offloading import offload_in
from zerooffload.planner import placement
from zerooffload.runtime.build import environment
from zerooffload.sharding.collectives import Collectives, GroupCollectives, SingleRank

NUM_STEPS = 5
KEPT = 2


def checkpoints(folder: str | Path) -> Path:
    """Where they are saved."""
    return Path(folder, "checkpoints")


def train_and_save(rank: int, world_size: int, folder: str, kill: Kill | None) -> dict[str, Any]:
    """Train to the end from the newest checkpoint in a folder, saving after each step, at once or beside the next.

    Returns the moments that came, and digests of all states by step. The log has "saved step" when a checkpoint is
    there.
    """
    moments = Moments(kill if kill is not None and kill.rank == rank else None)
    moments.watch_files(str(checkpoints(folder)))
    log = Log(log_path(folder, rank))
    model = _offloaded(world_size, moments)
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    first, digests, tickets = 0, {}, []
    if any(checkpoints(folder).glob("save-*")):
        first = zo.load(checkpoints(folder), model, optimizer)
        digests[first] = _digest(model, optimizer)
    for step in range(first, NUM_STEPS):
        even_shares(world_size)[rank].loss(model, global_batch(step, 0)).backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for number, ticket in tickets:
            ticket.wait()
            log.write("saved", number)
        digests[step + 1] = _digest(model, optimizer)
        ticket = zo.save(checkpoints(folder), model, optimizer, step + 1, blocking=step % 2 == 0, keep_last=KEPT)
        tickets = [(step + 1, ticket)]
    if first == NUM_STEPS:
        # The next save, which removes what the one left behind that was killed.
        zo.save(checkpoints(folder), model, optimizer, first, keep_last=KEPT)
    zo.close(model)
    return {"moments": dict(moments.counts), "digests": digests}


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = xxhash.xxh3_64()
    state = optimizer.state_dict()["state"]
    tensors = [*whole_params(model).values(), *(value for entry in state.values() for value in entry.values())]
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _offloaded(world_size: int, moments: Moments) -> nn.Module:
    # Several chunks a block.
    placement.CHUNK_NUMEL = 4096
    config = zo.OffloadConfig(host_memory="32MiB", threads=1, update="after_backward")
    collectives: Collectives = GroupCollectives(dist.group.WORLD) if world_size > 1 else SingleRank()
    real = environment(config, default_accelerator(), collectives)
    watched = replace(real, open_engine=lambda: WatchedEngine(real.open_engine(), moments))
    return offload_in(small_gpt2(), config, watched)
