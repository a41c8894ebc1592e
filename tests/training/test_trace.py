"""A timeline shows what took place, and changes nothing of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from support.environments import simulated
from support.reference_training import Outcome, Recipe, differences, offload_prepared
from support.simulated_accelerator import Copies
from support.simulated_engine import Transfers
from support.small_models import VOCABULARY, batch, small_llama
from support.trace_events import read_trace
from support.traced_training import check_steps, train_traced
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerooffload as zo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("small_chunks", "no_cache")

LLAMA = Recipe(num_steps=4)


class Checkpointing(nn.Module):
    """Two blocks that are called again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()


def checkpointing() -> nn.Module:
    torch.manual_seed(5)
    return Checkpointing()


CHECKPOINTED = Recipe(build=checkpointing, loss=lambda model, tokens: model(tokens), num_steps=3)
NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "host_memory": "16MiB"}
IN_STEP = {**NVME, "update": "after_backward"}
"""So that each step's slices lie in the step."""


@pytest.mark.parametrize("engine", ["threads", "aiofiles", "auto"])
def test_a_traced_run_has_the_same_bits_and_its_lanes_add_up(
    engine: str, nvme: Path, tmp_path: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    path = tmp_path / "out.json"
    outcome = train_traced(LLAMA, None, path, nvme_paths=[nvme], io_engine=engine, **IN_STEP)
    assert differences(plain(LLAMA), outcome) == []
    trace = read_trace(path)
    assert [event["name"] for event in trace.lanes["step"]] == ["step 2", "step 3", "step 4"]
    assert outcome.report is not None
    check_steps(trace, outcome.report)
    assert {"compute", "CPU update", "nvme read", "nvme write", "stall"} <= set(trace.lanes)
    # On a CPU one thread does all this: nothing of it at the same time.
    inline = sorted(
        (event for lane in ("compute", "CPU update", "stall") for event in trace.lanes[lane]), key=lambda e: e["ts"]
    )
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(inline))


def test_names_are_those_of_the_modules_and_of_their_buffers(nvme: Path, tmp_path: Path) -> None:
    train_traced(LLAMA, None, tmp_path / "out.json", nvme_paths=[nvme], **IN_STEP)
    lanes = read_trace(tmp_path / "out.json").lanes
    names = {lane: {event["name"] for event in slices} for lane, slices in lanes.items()}
    assert {"forward model.layers.0", "backward model.layers.1", "forward (root)"} <= names["compute"]
    assert "update kernel model.layers.1/float32 #0" in names["CPU update"]
    assert "gradient accumulation model.layers.0/float32" in names["CPU update"]
    assert "model.layers.0/float32 parameters #0" in names["nvme read"]
    assert "model.layers.1/float32 optimizer state #1" in names["nvme write"]
    assert {"parameter read", "state read", "state write"} <= names["stall"]


def test_checkpointing_computes_again(nvme: Path, tmp_path: Path, plain: Callable[[Recipe], Outcome]) -> None:
    outcome = train_traced(CHECKPOINTED, None, tmp_path / "out.json", nvme_paths=[nvme], **NVME)
    assert differences(plain(CHECKPOINTED), outcome) == []
    names = [event["name"] for event in read_trace(tmp_path / "out.json").lanes["compute"]]
    assert {"forward blocks.0", "recompute blocks.0", "backward blocks.0"} <= set(names)


def test_memory_of_each_tier_is_told(nvme: Path, tmp_path: Path) -> None:
    outcome = train_traced(LLAMA, None, tmp_path / "out.json", nvme_paths=[nvme], **NVME)
    counters = read_trace(tmp_path / "out.json").counters
    assert outcome.report is not None
    for tier in outcome.report.tiers:
        assert max(value for _, value in counters[f"memory: {tier.name}"]) == tier.peak_bytes
    assert max(value for _, value in counters["memory: parameters in use"]) > 0
    assert min(value for _, value in counters["memory: process"]) > 0


@pytest.mark.parametrize("copies", Copies)
def test_a_device_with_memory_of_its_own_has_copies_both_ways(
    copies: Copies, nvme: Path, tmp_path: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    with simulated(copies, Transfers.LAZY) as environment:
        settings = {**NVME, "gradients": "host", "optimizer": "host", "nvme_paths": [nvme], "device_memory": "16MiB"}
        outcome = train_traced(LLAMA, environment, tmp_path / "out.json", **settings)
        assert environment.accelerator.num_spoiled == 0  # type: ignore[attr-defined]
    assert differences(plain(LLAMA), outcome) == []
    lanes = read_trace(tmp_path / "out.json").lanes
    assert {"copy in", "copy out"} <= set(lanes)
    assert {event["name"] for event in lanes["copy out"]} >= {"model.layers.0/float32 gradients #0"}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    LLAMA.loss(model, batch(step, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def training(nvme: Path) -> Callable[[int], None]:
    """Trains a step of a model that is closed at the end; `training.model` is the model."""
    model = offload_prepared(LLAMA, nvme_paths=[nvme], **NVME)
    optimizer = zo.AdamW(model.parameters())

    def train(step: int) -> None:
        one_step(model, optimizer, step)

    train.model = model  # type: ignore[attr-defined]
    yield train  # type: ignore[misc]
    zo.close(model)


def test_so_many_steps_are_traced_and_then_nobody_listens(training: Callable[[int], None], tmp_path: Path) -> None:
    model = training.model  # type: ignore[attr-defined]
    with zo.trace(model, tmp_path / "out.json", steps=2):
        for step in range(4):
            training(step)
        nbytes = (tmp_path / "out.json").stat().st_size
        # Nobody follows any more: another may begin.
        with zo.trace(model, tmp_path / "other.json"):
            training(4)
    assert (tmp_path / "out.json").stat().st_size == nbytes
    assert len(read_trace(tmp_path / "out.json").lanes["step"]) == 2
    assert len(read_trace(tmp_path / "other.json").lanes["step"]) == 1


def test_the_trace_of_a_run_that_is_interrupted_loads(training: Callable[[int], None], tmp_path: Path) -> None:
    model = training.model  # type: ignore[attr-defined]

    def interrupted() -> None:
        with zo.trace(model, tmp_path / "out.json"):
            training(0)
            assert len(read_trace(tmp_path / "out.json").lanes["step"]) == 1
            LLAMA.loss(model, batch(1, 0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    last = read_trace(tmp_path / "out.json").lanes["compute"][-1]
    assert last["name"].startswith("forward")


def test_one_trace_at_a_time(training: Callable[[int], None], tmp_path: Path) -> None:
    model = training.model  # type: ignore[attr-defined]
    with (
        zo.trace(model, tmp_path / "out.json"),
        pytest.raises(zo.ConfigError, match="traced already"),
        zo.trace(model, tmp_path / "other.json"),
    ):
        pass


def test_what_cannot_be_traced_is_the_users_error(training: Callable[[int], None], tmp_path: Path) -> None:
    with pytest.raises(zo.ConfigError, match="not offloaded"), zo.trace(small_llama(), tmp_path / "out.json"):
        pass
    model = training.model  # type: ignore[attr-defined]
    with pytest.raises(zo.ConfigError, match="at least 1"), zo.trace(model, tmp_path / "out.json", steps=0):
        pass
