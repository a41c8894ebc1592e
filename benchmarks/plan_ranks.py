"""From 8 to 1,024 ranks on paper: what a rank sends, holds and waits for, on machines like a DGX-2.

    python benchmarks/plan_ranks.py --json

Each rank has a batch of its own, so the work of a rank stays the same. Prints one object: the rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paper_models import Gpt, plan_paper_model
from plot_lines import Line, line_chart

from zerooffload.config import OffloadConfig, TierName
from zerooffload.planner.profiles import MachineProfile, cluster_of, find_machine

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODEL = Gpt(hidden=5120, layers=40)
BATCH_SIZE = 8
CONFIG = OffloadConfig(params="device", gradients="host", optimizer="host")


def machine_of(ranks: int) -> MachineProfile:
    """So many GPUs of DGX-2s: a half of one, or some."""
    machine = find_machine("dgx2")
    count, host = machine.device.count, machine.host
    if ranks >= count:
        return cluster_of(machine, ranks // count)
    part = ranks / count
    update = {
        "memory": int(host.memory * part),
        "cores": int(host.cores * part),
        "memory_bandwidth": host.memory_bandwidth * part,
    }
    return machine.model_copy(
        update={
            "name": "half of a dgx2",
            "device": machine.device.model_copy(update={"count": ranks}),
            "host": host.model_copy(update=update),
        }
    )


def rows() -> list[dict[str, Any]]:
    """A row for each number of ranks."""
    found = []
    for ranks in RANKS:
        plan = plan_paper_model(MODEL, CONFIG, machine_of(ranks), batch_size=BATCH_SIZE, checkpoints=True)
        accounts = {account.tier: account for account in plan.estimate.memory}
        moved = plan.estimate.bytes_moved
        homes = [claim for claim in accounts[TierName.DEVICE].claims if claim.holder == "parameters"]
        found.append(
            {
                "ranks": ranks,
                "num_params": plan.num_params,
                "gathered": moved["gathered"],
                "reduced": moved["reduced"],
                "link_seconds": plan.estimate.busy["link"],
                "params_on_device": sum(claim.nbytes for claim in homes),
                "host": accounts[TierName.HOST].leased_bytes,
                "seconds": plan.estimate.seconds,
                "bound": plan.estimate.bound,
                "tokens_per_second": plan.estimate.tokens_per_second,
            }
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    columns = (
        "ranks",
        "gathered",
        "reduced",
        "on the link",
        "parameters on device",
        "host",
        "step",
        "bound",
        "tokens/s",
        "a rank's part of that, of 8 ranks = 1",
    )
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    first = found[0]["tokens_per_second"] / found[0]["ranks"]
    return head + "".join(
        f"| {row['ranks']:,} | {row['gathered'] / 1e9:.1f} GB | {row['reduced'] / 1e9:.1f} GB"
        f" | {row['link_seconds']:.2f} s | {row['params_on_device'] / 1e9:.3f} GB | {row['host'] / 1e9:.2f} GB"
        f" | {row['seconds']:.2f} s | {row['bound']} | {row['tokens_per_second']:,.0f}"
        f" | {row['tokens_per_second'] / row['ranks'] / first:.2f} |\n"
        for row in found
    )


def plot(found: list[dict[str, Any]], folder: Path) -> None:
    """Draw times, and bytes, over the number of ranks."""

    def values(unit: float, *names: str) -> list[float]:
        return [sum(row[name] for name in names) / unit for row in found]

    times = [Line("step", values(1, "seconds")), Line("gathers and reductions", values(1, "link_seconds"))]
    sizes = [
        Line("gathered and reduced", values(1e9, "gathered", "reduced")),
        Line("in host memory", values(1e9, "host")),
        Line("parameters on device", values(1e9, "params_on_device")),
    ]
    ranks = [row["ranks"] for row in found]
    charts = {
        "plan_ranks.svg": line_chart("A step of each number of ranks", ranks, times, "s"),
        "plan_ranks_bytes.svg": line_chart("Bytes of a rank", ranks, sizes, "GB"),
    }
    for name, chart in charts.items():
        (folder / name).write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw it there")
    args = parser.parse_args()
    all_rows = rows()
    print(json.dumps({"rows": all_rows}, indent=1) if args.json else table(all_rows))
    if args.plot:
        plot(all_rows, args.plot)
