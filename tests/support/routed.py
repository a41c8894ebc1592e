"""A model of which each rank uses other parts; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from support.rank_accounts import AMPLE_BYTES, least_device_memory
from support.rank_training import OPTIONS, whole_params
from torch import nn

import zerooffload as zo
from zerooffload.errors import RankError


class Use(StrEnum):
    """What a rank makes of the second block in a step.

    YES: its output counts. UNSEEN: it is called, but its output does not reach the loss. TIMES_ZERO: it counts nothing,
    but the loss depends on it. NO: it is not called. NO_OTHER: another one is not called.
    """

    YES = "yes"
    UNSEEN = "unseen"
    TIMES_ZERO = "times zero"
    NO = "no"
    NO_OTHER = "no other"


class Routed(nn.Module):
    """Blocks of one size: no length of a message tells one from another. Some may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, hidden: torch.Tensor, use: Use) -> torch.Tensor:
        """The loss."""
        for number, block in enumerate(self.blocks):
            if (number, use) in {(1, Use.NO), (2, Use.NO_OTHER)}:
                continue
            change = torch.tanh(block(hidden))
            if number == 1 and use is Use.UNSEEN:
                change = change.detach()
            if number == 1 and use in (Use.UNSEEN, Use.TIMES_ZERO):
                change = 0.0 * change
            hidden = hidden + change
        return hidden.square().mean()


def routed_input(rank: int, step: int) -> torch.Tensor:
    """`[3, 64]`."""
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def train_routed(
    rank: int,
    world_size: int,
    uses: Sequence[Sequence[Use]],
    least_window: bool,  # noqa: FBT001 - arguments of ranks have places
) -> dict[str, Any]:
    """Steps in which rank `r` uses the second block as `uses[step][r]` says."""
    config = zo.OffloadConfig(device_memory=AMPLE_BYTES, host_memory=AMPLE_BYTES, threads=1)
    if least_window:
        config = config.model_copy(update={"device_memory": least_device_memory(Routed(), config)})
    model = zo.offload(Routed(), config)
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    norms = []
    for step, of_ranks in enumerate(uses):
        model(routed_input(rank, step), of_ranks[rank]).backward()
        norms.append(zo.clip_grad_norm_(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    # A part after the other: the least window does not hold all.
    params = {
        f"{number}.{name}": value
        for number, block in enumerate(model.blocks)
        for name, value in whole_params(block).items()
    }
    zo.close(model)
    assert world_size == len(uses[0])
    return {"norms": norms, "params": params}


def refusal_of_routed(
    rank: int,
    world_size: int,
    uses: Sequence[Use],
    least_window: bool,  # noqa: FBT001 - arguments of ranks have places
) -> str:
    """What ranks are told that cannot use the second block as they would."""
    try:
        train_routed(rank, world_size, [uses], least_window)
    except RankError as error:
        return str(error)
    return "trained"
