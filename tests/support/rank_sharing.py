"""Ranks beside devices with memory of their own, whose frozen parameters are at home on host."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.environments import simulated_devices
from support.rank_training import OPTIONS, offload_config, whole_params
from support.small_models import VOCABULARY, batch
from torch import nn

import zerooffload as zo
from zerooffload.sharding.collectives import GroupCollectives
from zerooffload.sharding.registry import residence_of

NUM_STEPS = 3
WIDTH = 256
_HOMES = ("host", "host", "host")


class Adapted(nn.Module):
    """A frozen layer with a trained one of few parameters beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return hidden + torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


class MostlyFrozen(nn.Module):
    """An embedding, which is frozen too, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = hidden @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def offloaded(folder: str, stage: int) -> nn.Module:
    """On this rank."""
    torch.manual_seed(5)
    return zo.offload(MostlyFrozen(), offload_config(folder, _HOMES, stage=stage))


def train_with_and_without(rank: int, world_size: int, folder: str, stage: int) -> list[dict[str, Any]]:
    """On one host copy, and on each rank's own as if the ranks were on machines of their own."""
    del world_size
    with simulated_devices():
        shared = _train(rank, folder, stage)
        gc.collect()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zerooffload.accelerator.shared_pages.this_machine", lambda: f"machine {rank}")
            own = _train(rank, folder, stage)
    return [shared, own]


def _train(rank: int, folder: str, stage: int) -> dict[str, Any]:
    model = offloaded(folder, stage)
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], **OPTIONS)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with zo.full_params(model.get_submodule("blocks.1")), torch.no_grad():
            model.get_parameter("blocks.1.base.weight").mul_(0.5)
    # All have touched all pages, and hold them until all have looked.
    dist.barrier()
    resident, own_part = shared_memory()
    dist.barrier()
    result = {
        "losses": losses,
        "params": whole_params(model),
        "leased": {tier.name: tier.leased_bytes for tier in zo.step_report(model).tiers},
        "frozen": _frozen_flats(model),
        "resident": resident,
        "own_part": own_part,
    }
    zo.close(model)
    return result


def _frozen_flats(model: nn.Module) -> list[int]:
    """Bytes of each flat buffer of frozen parameters."""
    residences = [residence_of(param) for param in model.parameters() if not param.requires_grad]
    return list({id(item.part): item.part.flat.layout.nbytes for item in residences if item is not None}.values())


def shared_memory() -> tuple[int, int]:
    """Bytes of the ranks' memory that are mapped here and resident, and this process's part of them."""
    sections = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = [section for section in sections if "/memfd:zerooffload" in section]

    def total(name: str) -> int:
        return sum(int(found) * 1024 for section in ours for found in re.findall(rf"(?m)^{name}:\s+(\d+)", section))

    return total("Rss"), total("Pss")


def edit_one_after_the_other(rank: int, _world_size: int, folder: str) -> torch.Tensor:
    """What every rank doubles, rank 0 first: the others begin when it has written, or waits for them."""
    store = dist.distributed_c10d._get_default_store()
    with simulated_devices(), pytest.MonkeyPatch.context() as patch:
        model = offloaded(folder, 2)
        weight = model.get_parameter("embed.weight")
        if rank == 0:
            gather = GroupCollectives.gather_objects

            def told(self: GroupCollectives, value: Any) -> list[Any]:
                store.set("edited", "")
                return gather(self, value)

            patch.setattr(GroupCollectives, "gather_objects", told)
        else:
            store.wait(["edited"])
        with zo.full_params(model.get_submodule("embed")), torch.no_grad():
            weight.mul_(2)
        if rank == 0:
            store.set("edited", "")
        edited = whole_params(model)["embed.weight"]
        zo.close(model)
    return edited


def lose_a_rank(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    """The last rank is killed after a backward; what the others are told, and what they then have of the memory."""
    with simulated_devices():
        model = offloaded(folder, 2)
        model(batch(0, rank)).backward()
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            zo.clip_grad_norm_(model, 1.0)
            told = ""
        except zo.ZeroOffloadError as error:
            told = str(error)
        zo.close(model)
    del model
    gc.collect()
    return told, shared_memory()[0]
