"""What ranks lease and what comes over their links; in a module that spawned processes can import."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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
from zerooffload.config import TierName
from zerooffload.runtime.param_access import units_of
from zerooffload.runtime.run import Run
from zerooffload.sharding import collectives
from zerooffload.sharding.unit import trainable
from zerooffload.tiers import Space

AMPLE_BYTES = 32 << 20
NUM_SOAK_STEPS = 12


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

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return (self.scale * hidden).square().mean()


@dataclass(frozen=True)
class Setup:
    """A model by name, whether its window is the least, the stage, and the parameters' home."""

    model: str
    least_window: bool
    stage: int = 3
    params: str = "host"


def received(rank: int, world_size: int, folder: str, setups: Sequence[Setup]) -> list[list[dict[str, int]]]:
    """For each setup: what each step receives.

    A step has one forward and one backward. The first is left out: it guesses what is needed next, and may gather what
    it then gives back unused.
    """
    assert world_size > rank
    return [_received_by_steps(rank, folder, setup) for setup in setups]


def _received_by_steps(rank: int, folder: str, setup: Setup) -> list[dict[str, int]]:
    def build() -> nn.Module:
        return Stack() if setup.model == "stack" else MODELS[setup.model]()

    def loss(model: nn.Module) -> torch.Tensor:
        if setup.model == "stack":
            value: torch.Tensor = model(torch.ones(2, 64))
            return value
        return Share(rank, rank + 1).loss(model, global_batch(0, 0))

    homes = (setup.params, "host", "host")
    config = offload_config(folder, homes, stage=setup.stage, device_memory=AMPLE_BYTES)
    if setup.least_window:
        config = config.model_copy(update={"device_memory": least_device_memory(build(), config)})
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


def held(rank: int, world_size: int, stages: Sequence[int]) -> list[dict[str, int]]:
    """Bytes of the memory in which each state of `Stack` lies, in bf16, on host; stage by stage."""
    found = []
    for stage in stages:
        model = zo.offload(Stack(256), zo.OffloadConfig(stage=stage, compute_dtype="bf16", threads=1))
        run, _ = units_of(model)
        assert isinstance(run, Run)
        states: dict[str, int] = {}
        for part, training in (flat for unit in run.units for flat in trainable(unit)):
            blocks = {"params": part.home, "gradients": training.gradient, "optimizer": training.optimizer}
            for name, block in blocks.items():
                memory = block.whole(Space.HOST)
                assert memory is not None
                states[name] = states.get(name, 0) + memory.untyped_storage().nbytes()
        leased = run._resources.budgets[TierName.HOST].holders()
        assert sum(leased[name] for name in ("parameters", "gradients", "optimizer state")) == sum(states.values())
        found.append(states)
        zo.close(model)
    assert world_size > rank
    return found


def buffers_of_steps(rank: int, world_size: int, stages: Sequence[int]) -> list[list[set[tuple[int, int]]]]:
    """Stage by stage, and step by step: address and length of all that collectives were given of floats."""
    found = []
    for stage in stages:
        model = zo.offload(Stack(), zo.OffloadConfig(stage=stage, threads=1, host_memory=AMPLE_BYTES))
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        steps: list[set[tuple[int, int]]] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_all_gather_single", "_reduce_scatter_single"):
                patch.setattr(collectives, name, _noting(steps, getattr(collectives, name)))
            for _ in range(NUM_SOAK_STEPS):
                steps.append(set())
                model(torch.ones(2, 64)).backward()
                optimizer.step()
                optimizer.zero_grad()
        report = zo.step_report(model)
        assert all(tier.peak_bytes == tier.planned_bytes for tier in report.tiers)
        found.append(steps)
        zo.close(model)
    assert world_size > rank
    return found


def _noting(steps: list[set[tuple[int, int]]], collective: Callable[..., None]) -> Callable[..., None]:
    def noting(output: torch.Tensor, given: torch.Tensor, **group: Any) -> None:
        if output.is_floating_point():
            steps[-1] |= {(tensor.data_ptr(), tensor.nbytes) for tensor in (output, given)}
        collective(output, given, **group)

    return noting


def least_device_memory(model: nn.Module, config: zo.OffloadConfig, process_group: Any = None) -> int:
    """The least device memory with which `model` is accepted, as the refusal of less says."""
    with pytest.raises(zo.BudgetError) as refused:
        zo.offload(model, config.model_copy(update={"device_memory": 0}), process_group=process_group)
    found = re.search(r"it needs (\d+) bytes", str(refused.value))
    return int(found.group(1)) if found else 0
