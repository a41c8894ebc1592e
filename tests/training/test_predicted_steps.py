"""What a plan says that a step moves and holds is what a run of it moves and holds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.formats import KIB, MIB
from zerooffload.planner.cost.demand import unit_demands
from zerooffload.planner.profiles import MachineProfile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zerooffload.planner.plan import Plan
    from zerooffload.telemetry import StepReport

WIDTH, DEPTH, BATCH = 256, 5, 8
BYTES_TOLERANCE = 0.01
NUM_WARM_UP, NUM_STEPS = 3, 4
HOMES = ("params", "optimizer", "gradients")
ON_NVME = dict.fromkeys(HOMES, "nvme")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on host": dict.fromkeys(HOMES, "host"),
    "copies on nvme": {**dict.fromkeys(HOMES, "host"), "durable": True},
    "optimizer on nvme": {**dict.fromkeys(HOMES, "host"), "optimizer": "nvme"},
    "gradients on nvme": {**dict.fromkeys(HOMES, "host"), "gradients": "nvme"},
    "all on nvme": ON_NVME,
    "all on nvme, in place": {**ON_NVME, "atomic_steps": False},
    "inputs of blocks on nvme": {**ON_NVME, "activations": "nvme"},
    "slices": {**ON_NVME, "micro_batch_size": 2},
    "bf16 moments": {**ON_NVME, "moments": "bf16"},
}
ROOMS = {"none": 0, "some": 10 * MIB, "all": 64 * MIB}
"""Host memory beyond the least that a run needs."""

CASES = [
    *((placement, "none", 1) for placement in PLACEMENTS),
    *(("all on nvme", room, 2) for room in ROOMS),
    ("gradients on nvme", "none", 2),
    ("inputs of blocks on nvme", "none", 2),
    ("slices", "all", 1),
]


class Block(nn.Module):
    def __init__(self, inner_width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, inner_width)
        self.outer = nn.Linear(inner_width, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.outer(torch.relu(self.inner(batch)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH * (1 + number % 3)) for number in range(DEPTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch


def run_step(model: nn.Module, batch_size: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(batch_size, WIDTH)).square().mean()
    return loss


def planned(config: zo.OffloadConfig, nvme: Path) -> Plan:
    machine = MachineProfile.from_mapping(
        {
            "name": "some machine",
            "device": {
                "memory": "8GiB",
                "shares_host_memory": True,
                "matmul_flops": {"fp32": 1e11},
                "memory_bandwidth": "20GB",
            },
            "host": {"memory": "8GiB", "cores": 2, "memory_bandwidth": "20GB"},
            "drives": [{"path": str(nvme), "read": "3GB", "write": "3GB"}],
        }
    )
    return zo.plan(Net(), config, run_step=run_step, batch_size=BATCH, machine=machine)


def host_memory(config: zo.OffloadConfig, nvme: Path, room: str) -> int:
    """A budget with room for none, some or all of the updated chunks to stay in host memory."""
    with pytest.raises(zo.BudgetError, match="host budget") as refusal:
        planned(config.model_copy(update={"host_memory": KIB}), nvme)
    found = re.search(r"it needs (\d+) bytes", str(refusal.value))
    assert found is not None
    return int(found[1]) + ROOMS[room]


def reports(config: zo.OffloadConfig) -> Iterator[StepReport]:
    torch.manual_seed(0)
    model = zo.offload(Net(), config)
    try:
        optimizer = zo.AdamW(model.parameters(), lr=1e-3)
        for step in range(NUM_WARM_UP + NUM_STEPS):
            for _ in range(config.accumulation_steps or 1):
                run_step(model, BATCH).backward()
            zo.clip_grad_norm_(model, 1e9)
            optimizer.step()
            optimizer.zero_grad()
            if step >= NUM_WARM_UP:
                yield zo.step_report(model)
    finally:
        zo.close(model)


def run_of(plan: Plan, config: zo.OffloadConfig) -> list[StepReport]:
    return [*reports(zo.OffloadConfig(**{**config.model_dump(exclude_unset=True), **plan.settings}))]


def configured(placement: str, room: str, nvme: Path, **settings: Any) -> zo.OffloadConfig:
    config = zo.OffloadConfig(**PLACEMENTS[placement], nvme_paths=[str(nvme)], **settings)
    return config.model_copy(update={"host_memory": host_memory(config, nvme, room)})


@pytest.mark.parametrize(("placement", "room", "accumulation"), CASES)
def test_bytes_by_link_and_leases_are_those_of_the_plan(
    placement: str, room: str, accumulation: int, nvme: Path
) -> None:
    config = configured(placement, room, nvme, update="after_backward", accumulation_steps=accumulation)
    plan = planned(config, nvme)
    run = run_of(plan, config)
    for link, predicted in plan.estimate.bytes_moved.items():
        moved = sum(report.bytes_moved[link] for report in run) / len(run)
        assert predicted == pytest.approx(moved, rel=BYTES_TOLERANCE), link
    check_leases(plan, run[-1])


@pytest.mark.parametrize(
    ("room", "update", "accumulation"),
    [("some", "under_next_forward", 1), ("some", "during_backward", 2), ("all", "during_backward", 1)],
)
def test_bytes_of_hidden_updates_are_those_of_the_plan(room: str, update: str, accumulation: int, nvme: Path) -> None:
    """Of an update that goes on when a step is told, some bytes count in the next: at most those of one update."""
    config = configured("all on nvme", room, nvme, update=update, accumulation_steps=accumulation)
    plan = planned(config, nvme)
    run = run_of(plan, config)
    demands = unit_demands(plan.announced.placement).values()
    for link, predicted in plan.estimate.bytes_moved.items():
        of_update = sum(demand.update.moved()[link] for demand in demands)
        moved = sum(report.bytes_moved[link] for report in run)
        assert abs(moved - predicted * len(run)) <= BYTES_TOLERANCE * moved + of_update, link
    check_leases(plan, run[-1])


def check_leases(plan: Plan, report: StepReport) -> None:
    leased = {account.tier.value: account.leased_bytes for account in plan.estimate.memory}
    assert {tier.name: tier.planned_bytes for tier in report.tiers} == leased
    assert {tier.name: tier.peak_bytes for tier in report.tiers} == leased
