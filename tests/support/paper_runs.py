"""Runs on paper: small models planned for a published machine, whose rates a test may change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from zerooffload.planner.adapting import RunOnPaper
from zerooffload.planner.held import predicted_seconds
from zerooffload.planner.profiles import find_machine
from zerooffload.telemetry import StepReport, TierUsage
from zerooffload.train.planning import Planner
from zerooffload.train.recipe import Recipe, recipe_from

if TYPE_CHECKING:
    from zerooffload.planner.plan import Plan

PLANNER = Planner()


def paper_recipe(**offload: Any) -> Recipe:
    """Of a Llama with four blocks."""
    return recipe_from(
        {
            "model": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": 257,
                    "hidden_size": 512,
                    "intermediate_size": 2048,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                }
            },
            "data": {"path": "none"},
            "offload": {"nvme_paths": ["/mnt/nvme"], "device_memory": "2GiB", **offload},
            "training": {"steps": 500, "batch_size": 2, "sequence_length": 64, "max_grad_norm": 1.0},
        }
    )


def paper_plan(recipe: Recipe) -> Plan:
    """On one GPU with one drive."""
    return PLANNER.plan(recipe, find_machine("rtx4090"))


@cache
def run_on_paper(host_memory: str, *on_nvme: str) -> RunOnPaper:
    """With these states on nvme, and the others on host."""
    homes = {state: "nvme" if state in on_nvme else "host" for state in ("params", "optimizer", "gradients")}
    plan = paper_plan(paper_recipe(**homes, host_memory=host_memory))
    return RunOnPaper(announced=plan.announced, model=plan.model, machine=plan.machine, kind=plan.kind)


def with_slower_drives(run: RunOnPaper, factor: float) -> RunOnPaper:
    """By so much, in both directions."""
    drives = tuple(
        drive.model_copy(
            update={"read": drive.read / factor, "write": drive.write / factor, "sustained_write": None, "mixed": ()}
        )
        for drive in run.machine.drives
    )
    return replace(run, machine=run.machine.model_copy(update={"drives": drives}))


def done_step(run: RunOnPaper, number: int = 3, *, times: float = 1.0) -> StepReport:
    """What a run reports of a step that takes, in all its parts, so many times what is predicted of it."""
    estimate = run.estimate()
    seconds = predicted_seconds(estimate, computes_on_host=run.machine.device.shares_host_memory)
    leased = {account.tier.value: account.leased_bytes for account in estimate.memory}
    return StepReport(
        step=number,
        seconds=times * estimate.seconds,
        bytes_moved={link: round(nbytes) for link, nbytes in estimate.bytes_moved.items()},
        waits={"parameter read": 0.001},
        work={},
        hidden_work={"update kernel": times * seconds["update"], "gradient norm": times * seconds["landing"]},
        busy={"drive": times * seconds["drive"]},
        tiers=tuple(
            TierUsage(name=name, budget_bytes=nbytes, planned_bytes=nbytes, leased_bytes=nbytes, peak_bytes=nbytes)
            for name, nbytes in leased.items()
        ),
        baseline_bytes=0,
        process_peak_bytes=0,
    )
