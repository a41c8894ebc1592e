"""How long a plan is looked for: Llamas of 32, 80 and 200 blocks on GPUs of 24 GB, with all homes to be found.

    python benchmarks/plan_search.py --table benchmarks/results/plan_search.md
    python benchmarks/plan_search.py --blocks 32 --repeats 1

What is timed is all between a model on the meta device and its plan, but for the trace of its forward and backward,
which is made once before. All cases take turns. A missed target does not change the exit status.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from disk_limit import add_result_files, check, count, machine, on_what, tell_with_table, versions
from paper_models import Llama, plan_paper_model

from zerooffload.config import OffloadConfig
from zerooffload.formats import format_count, format_seconds
from zerooffload.planner.profiles import find_machine

BLOCKS = (32, 80, 200)
MACHINES = ("rtx4090", "4x-rtx4090")
SETTINGS: dict[str, dict[str, Any]] = {
    "homes": {"micro_batch_size": 1, "activations": "host"},
    "homes, slices and activations": {"micro_batch_size": "auto", "activations": "auto"},
}
"""What "auto" leaves to be found."""
BATCH_SIZE = 4
TARGET_BLOCKS, TARGET_SECONDS = 200, 2.0


def plan(num_blocks: int, machine_name: str, found: str) -> int:
    """Find one; how many parameters the model has."""
    llama = Llama(hidden=4096, intermediate=14336, layers=num_blocks, kv_heads=8, vocabulary=32000)
    profile = find_machine(machine_name)
    config = OffloadConfig(**SETTINGS[found], nvme_paths=[drive.path for drive in profile.drives])
    return plan_paper_model(llama, config, profile, batch_size=BATCH_SIZE).num_params


def rows(blocks: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each case."""
    cases = list(product(blocks, MACHINES, SETTINGS))
    # The models are made, and traced.
    num_params = {case: plan(*case) for case in cases}
    seconds: dict[tuple[int, str, str], list[float]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            begin = time.perf_counter()
            plan(*case)
            seconds[case].append(time.perf_counter() - begin)
    return [
        {
            **dict(zip(("blocks", "machine", "found"), case, strict=True)),
            "num_params": num_params[case],
            "seconds": {"median": statistics.median(times), "all": times},
        }
        for case, times in seconds.items()
    ]


def table(result: Mapping[str, Any]) -> str:
    """In Markdown."""
    lines = "".join(
        f"| {row['blocks']} | {format_count(row['num_params'])} | {row['machine']} | {row['found']} |"
        f" {format_seconds(row['seconds']['median'])} | {format_seconds(min(row['seconds']['all']))} to"
        f" {format_seconds(max(row['seconds']['all']))} |\n"
        for row in result["rows"]
    )
    repeats = len(result["rows"][0]["seconds"]["all"])
    return f"""# How long a plan is looked for

{on_what(result)}. `python benchmarks/plan_search.py`: Llamas in bf16, {BATCH_SIZE} sequences of 2,048 tokens,
medians of {repeats}. The trace of the model's operations, made once before, is not counted.

| blocks | parameters | machine | what is found | median | from, to |
|---|---|---|---|---|---|
{lines}"""


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=count, nargs="+", default=list(BLOCKS), metavar="N")
    parser.add_argument("--repeats", type=count, default=5, help="5")
    add_result_files(parser)
    args = parser.parse_args()
    timed = rows(args.blocks, args.repeats)
    checks = [
        check(
            f"{row['blocks']} blocks, {row['machine']}, {row['found']}",
            row["seconds"]["median"],
            TARGET_SECONDS,
            "lower",
        )
        for row in timed
        if row["blocks"] <= TARGET_BLOCKS
    ]
    result = {"machine": machine(Path()), "versions": versions(), "rows": timed, "checks": checks}
    tell_with_table(result, args, table)


if __name__ == "__main__":
    main()
