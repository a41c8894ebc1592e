"""Plans for setups that many people have: Llamas of three sizes on one and four GPUs of 24 GB, with what they take.

    python benchmarks/plan_setups.py                                  # prints Markdown
    python benchmarks/plan_setups.py --write benchmarks/results/plan_setups.md

Each plan is for eight sequences of 2,048 tokens a rank, in slices of one, with the blocks' inputs on host, or on nvme
if they do not fit there; where states live is the planner's choice. Also prints the largest models that fit a DGX-2
(plan_sizes.py), and 8 to 1,024 ranks (plan_ranks.py). With `--json` one object: versions, rows and checks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import plan_ranks
import plan_sizes
from paper_models import Llama, plan_paper_model

from zerooffload import __version__
from zerooffload.config import OffloadConfig, TierName
from zerooffload.errors import BudgetError
from zerooffload.formats import format_bytes, format_count, format_seconds
from zerooffload.planner.plan import Plan
from zerooffload.planner.profiles import MachineProfile, find_machine
from zerooffload.train.planning import changed_machine

MODELS = {
    "8 B": Llama(hidden=4096, intermediate=14336, layers=32, kv_heads=8, vocabulary=128256),
    "32 B": Llama(hidden=6656, intermediate=17920, layers=60, kv_heads=52, vocabulary=32000),
    "70 B": Llama(hidden=8192, intermediate=28672, layers=80, kv_heads=8, vocabulary=128256),
}
MACHINES = ("rtx4090", "4x-rtx4090")
MEMORIES = ("64GB", "128GB", "256GB")
NUM_DRIVES = (1, 2, 4)
BATCH_SIZE = 8
SETTINGS = {"micro_batch_size": 1, "activations": "host"}


def rows() -> Iterator[dict[str, Any]]:
    """A row for each setup."""
    for (name, model), machine, memory, num_drives in product(MODELS.items(), MACHINES, MEMORIES, NUM_DRIVES):
        settings = [f"machine.host.memory={memory}", f"machine.drives={num_drives}"]
        profile = changed_machine(find_machine(machine), settings)
        row: dict[str, Any] = {"model": name, "machine": machine, "memory": memory, "drives": num_drives}
        yield row | _figures(_plan(model, profile))


def _plan(model: Llama, machine: MachineProfile) -> Plan:
    config = OffloadConfig(**SETTINGS, nvme_paths=[drive.path for drive in machine.drives])
    try:
        return plan_paper_model(model, config, machine, batch_size=BATCH_SIZE)
    except BudgetError:
        smaller = config.model_copy(update={"activations": "nvme"})
        return plan_paper_model(model, smaller, machine, batch_size=BATCH_SIZE)


def _figures(plan: Plan) -> dict[str, Any]:
    step = plan.estimate
    written = step.bytes_written_per_day * plan.machine.device.count
    homes = {state: [getattr(homes, state) for homes in plan.homes.values()] for state in ("params", "optimizer")}
    return {
        "num_params": plan.num_params,
        "inputs": str(next(iter(plan.announced.placement.block_inputs.homes.values()))),
        "seconds": step.seconds,
        "floor_seconds": plan.floor_seconds,
        "tokens_per_second": step.tokens_per_second,
        "bound": step.bound,
        "busy_seconds": dict(step.busy),
        "bytes_written_per_day": written,
        "drive_days": plan.drive_days,
        "on_nvme": {state: tiers.count(TierName.NVME) / len(tiers) for state, tiers in homes.items()},
    }


def table(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    columns = (
        "model",
        "GPUs",
        "memory",
        "drives",
        "step",
        "floor",
        "tokens/s",
        "bound",
        "optimizer, parameters on nvme",
        "inputs",
        "written a day",
        "drives last",
    )
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "".join(_line(row) for row in found)


def _line(row: dict[str, Any]) -> str:
    gpus = find_machine(row["machine"]).device.count
    setup = f"| {row['model']} | {gpus} | {row['memory']} | {row['drives']} |"
    days = "" if row["drive_days"] is None else f"{row['drive_days']:,.0f} days"
    return (
        f"{setup} {format_seconds(row['seconds'])} | {format_seconds(row['floor_seconds'])}"
        f" | {row['tokens_per_second']:,.0f} | {row['bound']}"
        f" | {row['on_nvme']['optimizer']:.0%}, {row['on_nvme']['params']:.0%} | {row['inputs']}"
        f" | {format_bytes(round(row['bytes_written_per_day']))} | {days} |\n"
    )


def page(found: list[dict[str, Any]], sizes: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> str:
    """All tables."""
    num_params = {row["model"]: row["num_params"] for row in found}
    counts = ", ".join(f"{name} is {format_count(number)}" for name, number in num_params.items())
    gpt = plan_ranks.MODEL
    return f"""# Plans on paper

Nothing here was measured: `python benchmarks/plan_setups.py --write benchmarks/results/plan_setups.md` asks the
planner. What it says is explained in [planning](../../zerooffload/docs/planning.md), with the differences from papers.

## Llamas on GPUs of 24 GB

Profiles `rtx4090` and `4x-rtx4090`; bf16 with AdamW; {BATCH_SIZE} sequences of 2,048 tokens a rank and step, blocks in
slices of one, their inputs on host if they fit there. Parameters: {counts}.

{table(found)}
## The largest model that fits a DGX-2

{plan_sizes.table(sizes)}
## 8 to 1,024 ranks

GPT of {format_count(ranks[0]["num_params"])} parameters ({gpt.layers} layers of {gpt.hidden}) in fp16, stage 3,
parameters on device, gradients and optimizer state on host; {plan_ranks.BATCH_SIZE} sequences of 1,024 tokens a rank.
Bytes and memory are a rank's.

{plan_ranks.table(ranks)}"""


def checks(found: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step against its floor, and each size against the published one."""
    slowest = max(row["floor_seconds"] / row["seconds"] for row in found)
    floor = _check("floor, of the step", slowest, 1.01)
    return [
        floor,
        *(
            _check(f"{row['system']}: off the published", abs(row["ratio"] - 1), 0.25)
            for row in sizes
            if row["is_compared"]
        ),
    ]


def _check(name: str, value: float, target: float) -> dict[str, Any]:
    return {"name": name, "value": value, "target": target, "better": "lower", "ok": value <= target}


def main() -> None:
    """Plan all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the page there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the ranks there")
    args = parser.parse_args()
    found, sizes, ranks = list(rows()), plan_sizes.rows(), plan_ranks.rows()
    if args.plot:
        plan_ranks.plot(ranks, args.plot)
    if args.write:
        args.write.write_text(page(found, sizes, ranks), encoding="utf-8")
    if args.json:
        told = {"setups": found, "sizes": sizes, "ranks": ranks}
        versions = {"zerooffload": __version__}
        print(json.dumps({"machine": {}, "versions": versions, "rows": told, "checks": checks(found, sizes)}, indent=1))
    elif not args.write:
        print(page(found, sizes, ranks))


if __name__ == "__main__":
    main()
