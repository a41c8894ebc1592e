"""What a traced step teaches of a machine, and what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.planner.cost import speeds_of
from zerooffload.planner.profiles import MachineProfile
from zerooffload.planner.search.passes import compute_seconds
from zerooffload.telemetry import Lane, Span
from zerooffload.train.tuning.corrections import corrections_from

if TYPE_CHECKING:
    from pathlib import Path

    from zerooffload.planner.plan import Plan

WIDTH, BATCH = 64, 1024


def run_step(model: nn.Module, batch_size: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(batch_size, WIDTH)).sum()
    return loss


def planned(nvme: Path, **corrections: float) -> Plan:
    """Slow enough that everything takes a good part of a step."""
    machine = MachineProfile.from_mapping(
        {
            "name": "a slow machine",
            "device": {
                "memory": "4GiB", "shares_host_memory": True, "matmul_flops": {"fp32": 1e9}, "memory_bandwidth": "1GB",
            },
            "host": {"memory": "4GiB", "cores": 2, "memory_bandwidth": "1GB", "update_bandwidth": "1MB"},
            "drives": [{"path": str(nvme), "read": "1MB", "write": "1MB"}],
            "corrections": corrections,
        }
    )  # fmt: skip
    config = zo.OffloadConfig(
        params="nvme", optimizer="nvme", gradients="nvme", nvme_paths=[nvme], update="after_backward"
    )
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return zo.plan(model, config, run_step=run_step, batch_size=BATCH, machine=machine)


def predicted(plan: Plan) -> dict[str, float]:
    compute = sum(compute_seconds(plan.model, plan.kind, speeds_of(plan.machine)))
    return {**plan.estimate.busy, "compute": compute}


def one_after_the_other(plan: Plan, **factors: float) -> list[Span]:
    """A step in which compute, the update and the drive take so many times what was predicted of them."""
    busy, now, spans = predicted(plan), 0.0, []
    for name, lane, what in (
        ("compute", Lane.COMPUTE, "forward 0"),
        ("update", Lane.CPU_UPDATE, "update kernel 0"),
        ("drive", Lane.NVME_READ, "0"),
    ):
        seconds = factors.get(name, 1.0) * busy[name]
        spans.append(Span(lane, what, now, now + seconds))
        now += seconds
    return spans


def test_what_took_twice_as_long_counts_twice(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = corrections_from(plan, [one_after_the_other(plan, compute=2.0, update=0.5)])
    assert found == {"compute": pytest.approx(2.0), "update": pytest.approx(0.5), "drive": pytest.approx(1.0)}


def test_what_was_learned_before_is_corrected_further(tmp_path: Path) -> None:
    plan = planned(tmp_path, compute=1.5, link=1.2)
    found = corrections_from(plan, [one_after_the_other(plan, compute=1.2)])
    assert found["compute"] == pytest.approx(1.5 * 1.2)
    assert found["link"] == 1.2


def test_a_plan_with_what_was_learned_predicts_what_was_measured(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    step = one_after_the_other(plan, compute=1.7, update=2.5, drive=1.3)
    again = planned(tmp_path, **corrections_from(plan, [step]))
    took = {"compute": step[0], "update": step[1], "drive": step[2]}
    for name, span in took.items():
        assert predicted(again)[name] == pytest.approx(span.end_seconds - span.begin_seconds), name


def test_the_median_of_steps_counts(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    steps = [one_after_the_other(plan, compute=factor) for factor in (1.1, 3.0, 1.2)]
    assert corrections_from(plan, steps)["compute"] == pytest.approx(1.2)


def test_what_shares_its_cores_teaches_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    compute, update, drive = one_after_the_other(plan, compute=2.0)
    beside = Span(Lane.CPU_UPDATE, "update kernel 0", compute.begin_seconds, compute.end_seconds)
    assert set(corrections_from(plan, [[compute, beside, drive]])) == {"drive"}
    del update


@pytest.mark.parametrize("factor", [0.01, 0.2, 5.0])
def test_what_is_far_off_or_too_short_is_no_correction(factor: float, tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert "compute" not in corrections_from(plan, [one_after_the_other(plan, compute=factor)])


def test_a_step_without_spans_teaches_nothing(tmp_path: Path) -> None:
    corrections: dict[str, Any] = {"compute": 1.5}
    assert corrections_from(planned(tmp_path, **corrections), [[]]) == corrections
