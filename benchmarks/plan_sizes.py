"""The largest models that fit one DGX-2, found by asking the planner, beside those that papers have published.

    python benchmarks/plan_sizes.py

Each system's homes are given to the planner as settings, and blocks are added until the model does not fit. Hidden
sizes are those of the papers' models of about that size. Prints a table; with `--json` one object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from typing import Any

from paper_models import Gpt, plan_paper_model

from zerooffload.config import OffloadConfig
from zerooffload.errors import BudgetError
from zerooffload.formats import format_seconds
from zerooffload.planner.plan import Plan
from zerooffload.planner.profiles import find_machine

TOLERANCE = 0.25


@dataclass(frozen=True, kw_only=True)
class System:
    """A system of the papers.

    Attributes
    ----------
    published : float
        Parameters of the largest model that it trained.
    hidden : int
        Width of that model.
    settings : dict[str, Any]
        Its homes, as ours.
    is_compared : bool
        Whether that is how it did it.
    """

    name: str
    published: float
    hidden: int
    settings: dict[str, Any] = field(default_factory=dict)
    is_compared: bool = True


def _homes(params: str, gradients: str, optimizer: str, **more: Any) -> dict[str, Any]:
    return {"params": params, "gradients": gradients, "optimizer": optimizer, **more}


SYSTEMS = (
    System(name="data parallel", published=1.4e9, hidden=1536, settings=_homes("device", "device", "device", stage=0)),
    System(name="ZeRO-Offload", published=13e9, hidden=4096, settings=_homes("device", "host", "host", stage=2)),
    System(name="ZeRO-3", published=20e9, hidden=4096, settings=_homes("device", "device", "device")),
    System(name="ZeRO-Infinity, CPU", published=70e9, hidden=9216, settings=_homes("host", "host", "host")),
    System(name="ZeRO-Infinity, NVMe", published=1e12, hidden=16384, settings=_homes("nvme", "nvme", "nvme")),
    System(
        name="the same, atomic_steps = false",
        published=1e12,
        hidden=16384,
        settings=_homes("nvme", "nvme", "nvme", atomic_steps=False),
        is_compared=False,
    ),
)


def largest(system: System) -> Plan:
    """The plan of the deepest model of that width that fits."""
    plans: dict[int, Plan | None] = {}

    def fits(layers: int) -> bool:
        if layers not in plans:
            plans[layers] = _plan(system, layers)
        return plans[layers] is not None

    low = max(2, int(system.published / (12 * system.hidden**2) / 2))
    high = 2 * low
    while fits(high):
        low, high = high, high + high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    plan = plans.get(low) or _plan(system, low)
    if plan is None:
        raise SystemExit(f"{system.name}: not even {low} layers fit")
    return plan


def _plan(system: System, layers: int) -> Plan | None:
    machine = find_machine("dgx2")
    paths = [drive.path for drive in machine.drives] if "nvme" in system.settings.values() else []
    config = OffloadConfig(**system.settings, nvme_paths=paths)
    gpt = Gpt(hidden=system.hidden, layers=layers)
    try:
        return plan_paper_model(gpt, config, machine, batch_size=1, checkpoints=True)
    except BudgetError:
        return None


def rows() -> list[dict[str, Any]]:
    """A row for each system."""
    found = []
    for system in SYSTEMS:
        plan = largest(system)
        found.append(
            {
                "system": system.name,
                "hidden": system.hidden,
                "layers": len([name for name in plan.homes if ".h." in name]),
                "num_params": plan.num_params,
                "published": system.published,
                "ratio": plan.num_params / system.published,
                "is_compared": system.is_compared,
                "seconds": plan.estimate.seconds,
                "bound": plan.estimate.bound,
            }
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    head = (
        "| system | hidden | layers | largest | published | ratio | step | bound |\n|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {row['system']} | {row['hidden']:,} | {row['layers']} | {row['num_params'] / 1e9:.1f} B"
        f" | {row['published'] / 1e9:,.1f} B | {row['ratio']:.2f} | {format_seconds(row['seconds'])}"
        f" | {row['bound']} |\n"
        for row in found
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    all_rows = rows()
    print(json.dumps({"rows": all_rows}, indent=1) if parser.parse_args().json else table(all_rows))
