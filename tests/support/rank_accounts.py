"""What ranks lease and what comes over their links; in a module that spawned processes can import."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.environments import Homes
from support.rank_training import OPTIONS, Share, global_batch, offload_config
from support.small_models import MODELS
from torch import nn

import zerooffload as zo
from zerooffload.sharding import collectives

AMPLE_BYTES = 32 << 20


def leased(
    rank: int, world_size: int, folder: str, each_homes: Sequence[Homes], dtypes: Sequence[str]
) -> list[dict[str, int]]:
    """Leased bytes by tier after a step, for each choice of homes and each compute dtype."""
    found = []
    for homes in each_homes:
        for dtype in dtypes:
            model = MODELS["gpt2"]()
            zo.offload(model, offload_config(folder, homes, compute_dtype=dtype))
            optimizer = zo.AdamW(model.parameters(), **OPTIONS)
            Share(rank, rank + 1).loss(model, global_batch(0, 0)).backward()
            optimizer.step()
            found.append({tier.name: tier.leased_bytes for tier in zo.step_report(model).tiers})
            zo.close(model)
    assert world_size > rank
    return found


@dataclass
class Received:
    """Bytes that a rank got from the others."""

    gathered: int = 0
    reduced: int = 0


@contextmanager
def counted() -> Iterator[Received]:
    """Count at the calls of torch.distributed: of the floats that they fill, all but what this rank gave itself."""
    received = Received()
    all_gather, reduce_scatter = collectives._all_gather_single, collectives._reduce_scatter_single

    def counting_gather(output: torch.Tensor, shard: torch.Tensor, **group: Any) -> None:
        if output.is_floating_point():
            received.gathered += output.nbytes - shard.nbytes
        all_gather(output, shard, **group)

    def counting_scatter(shard: torch.Tensor, whole: torch.Tensor, **group: Any) -> None:
        received.reduced += whole.nbytes - shard.nbytes
        reduce_scatter(shard, whole, **group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_all_gather_single", counting_gather)
        patch.setattr(collectives, "_reduce_scatter_single", counting_scatter)
        yield received


class Stack(nn.Module):
    """Blocks of one size, and a scale that belongs to none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return (self.scale * hidden).square().mean()


def received(rank: int, world_size: int, each_case: Sequence[tuple[str, bool]]) -> list[list[dict[str, int]]]:
    """For each case (the model, and whether its window is the least): what each step receives.

    A step has one forward and one backward. The first is left out: it guesses what is needed next, and may gather what
    it then gives back unused.
    """
    assert world_size > rank
    return [_received_by_steps(rank, model, least_window=least) for model, least in each_case]


def _received_by_steps(rank: int, model_name: str, *, least_window: bool) -> list[dict[str, int]]:
    def build() -> nn.Module:
        return Stack() if model_name == "stack" else MODELS[model_name]()

    def loss(model: nn.Module) -> torch.Tensor:
        if model_name == "stack":
            value: torch.Tensor = model(torch.ones(2, 64))
            return value
        return Share(rank, rank + 1).loss(model, global_batch(0, 0))

    device_memory = least_device_memory(build()) if least_window else AMPLE_BYTES
    config = zo.OffloadConfig(device_memory=device_memory, host_memory=AMPLE_BYTES, threads=1)
    model = zo.offload(build(), config)
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    steps = []
    for _ in range(3):
        with counted() as count:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        reported = zo.step_report(model).bytes_moved
        assert {name: reported[name] for name in ("gathered", "reduced")} == vars(count)
        steps.append(dict(vars(count)))
    zo.close(model)
    return steps[1:]


def least_device_memory(model: nn.Module) -> int:
    """The least device memory with which `model` is accepted, as the refusal of less says."""
    with pytest.raises(zo.BudgetError) as refused:
        zo.offload(model, zo.OffloadConfig(device_memory=0, host_memory=AMPLE_BYTES, threads=1))
    found = re.search(r"it needs (\d+) bytes", str(refused.value))
    return int(found.group(1)) if found else 0
