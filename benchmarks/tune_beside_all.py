"""How near `zerooffload tune` comes to the best of all: each home of each state with each update mode, all tried.

Three small trainings of this machine: with ample memory, with less of it, and with two backwards a step.
Each recipe begins with everything on nvme and nothing hidden. It is tuned; then all configurations take a turn, those
that are near the best take further ones, in turns with what tune has found. The table tells what tune's took, and the
fastest of the others, from the same rounds.

    python benchmarks/tune_beside_all.py /mnt/nvme --table benchmarks/results/tune_beside_all.md
    python benchmarks/tune_beside_all.py /mnt/nvme --quick

The machine is calibrated first (or `--machine` is its profile). A missed target does not change the exit status.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from disk_limit import add_result_files, check, count, machine, on_what, scratch_folder, tell_with_table, versions

from zerooffload.calibration import calibrate
from zerooffload.config import UpdateMode
from zerooffload.errors import ZeroOffloadError
from zerooffload.formats import GIB, MIB, format_seconds
from zerooffload.planner.plan import STATES
from zerooffload.planner.profiles import MachineProfile, read_machine
from zerooffload.train.recipe import Recipe, recipe_from
from zerooffload.train.tuning.trial import Job, run_trial
from zerooffload.train.tuning.tune import Effort, Tuning, of_one_rank

TIERS = ("host", "nvme")
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "memory for all": {"host_memory": 4 * GIB, "accumulation": 1},
    "less memory": {"host_memory": 640 * MIB, "accumulation": 1},
    "two backwards": {"host_memory": GIB, "accumulation": 2},
}
SHAPE = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
BATCH_SIZE, SEQUENCE_LENGTH = 2, 64
TEXT = "The best plan is one that was tried; the best of all plans is one beside which all others were tried. " * 2000
NEAR = 1.15
"""Of the fastest: what is not slower takes part in the further rounds."""
MOST_ABOVE_BEST = 1.10
SPACE_BYTES = 6 * GIB


def recipe_of(folder: Path, workload: str, **settings: Any) -> Recipe:
    """14 M parameters on bytes."""
    wanted = WORKLOADS[workload]
    config = {"model_type": "llama", "vocab_size": 257, "max_position_embeddings": SEQUENCE_LENGTH, **SHAPE}
    return recipe_from(
        {
            "model": {"config": {**config, "num_key_value_heads": config["num_attention_heads"]}},
            "data": {"path": str(folder / "text.txt")},
            "offload": {"host_memory": wanted["host_memory"], "nvme_paths": [str(folder)], **settings},
            "training": {
                "steps": 1,
                "batch_size": BATCH_SIZE,
                "sequence_length": SEQUENCE_LENGTH,
                "accumulation_steps": wanted["accumulation"],
                "max_grad_norm": 1.0,
            },
        }
    )


def name_of(homes: Sequence[str], mode: str) -> str:
    """Of a configuration, in the table."""
    return ", ".join([*map(" ".join, zip(STATES, homes, strict=True)), mode])


def all_of(folder: Path, workload: str, *, is_quick: bool) -> dict[str, Recipe]:
    """Each home of each state, with each mode; or one home for all of them, and nothing hidden."""
    together = [[tier] * len(STATES) for tier in TIERS]
    return {
        name_of(homes, mode): recipe_of(folder, workload, **dict(zip(STATES, homes, strict=True)), update=mode)
        for homes in (together if is_quick else product(TIERS, repeat=len(STATES)))
        for mode in map(str, [UpdateMode.AFTER_BACKWARD] if is_quick else UpdateMode)
    }


def seconds_of(recipe: Recipe, args: argparse.Namespace) -> list[float]:
    """Of each step of a turn; none if it does not fit."""
    try:
        trial = run_trial(Job(recipe=recipe, num_steps=args.steps, num_warm_up=2), "training")
    except ZeroOffloadError as error:
        print(f"    refused: {str(error).splitlines()[0]}", file=sys.stderr)
        return []
    return list(trial.step_seconds)


def compare(workload: str, folder: Path, profile: MachineProfile, args: argparse.Namespace) -> dict[str, Any]:
    """Tune, then try everything."""
    begin = time.perf_counter()
    start = recipe_of(folder, workload, **dict.fromkeys(STATES, "nvme"), update=str(UpdateMode.AFTER_BACKWARD))
    effort = Effort(num_trials=args.trials, num_steps=args.steps)
    tuned = Tuning(start, profile, folder / "trials.json", effort).tune()
    took = time.perf_counter() - begin
    print(f"{workload}: tuned in {took:.0f} s: {tuned.best.key}", file=sys.stderr, flush=True)
    others = all_of(folder, workload, is_quick=args.quick)
    steps = {name: seconds_of(recipe, args) for name, recipe in others.items()}
    steps = {name: seconds for name, seconds in steps.items() if seconds}
    fastest = min(map(statistics.median, steps.values()))
    near = {name: others[name] for name, seconds in steps.items() if statistics.median(seconds) <= NEAR * fastest}
    rounds: dict[str, list[float]] = {name: [] for name in ("tuned", *near)}
    for number in range(args.rounds):
        turns = list({"tuned": tuned.best.recipe, **near}.items())
        for name, recipe in turns if number % 2 == 0 else turns[::-1]:
            rounds[name] += seconds_of(recipe, args)
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    best = min((name for name in medians if name != "tuned"), key=lambda name: medians[name])
    print(f"{workload}: {medians['tuned']:.3f} s, at best {medians[best]:.3f} s: {best}", file=sys.stderr, flush=True)
    return {
        "name": workload,
        "num_all": len(others),
        "num_that_fit": len(steps),
        "num_near": len(near),
        "tuning_seconds": took,
        "began_seconds": statistics.median(steps[name_of(["nvme"] * len(STATES), UpdateMode.AFTER_BACKWARD)]),
        "tuned": tuned.best.key,
        "tuned_seconds": medians["tuned"],
        "best": best,
        "best_seconds": medians[best],
        "rounds": rounds,
        "first_turns": steps,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as numbers."""
    with scratch_folder(args.path, SPACE_BYTES) as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        profile = of_one_rank(calibrate([folder]) if args.machine is None else read_machine(args.machine))
        rows = [compare(workload, folder, profile, args) for workload in list(WORKLOADS)[: 1 if args.quick else None]]
        return {
            "options": _options(args),
            "machine": machine(folder),
            "versions": versions("transformers"),
            "rows": rows,
            "checks": [_check_of(row) for row in rows],
        }


def _options(args: argparse.Namespace) -> str:
    """Those that a result depends on, as they were given."""
    numbers = [f"--{name} {getattr(args, name)}" for name in ("trials", "rounds", "steps")]
    return " ".join([*numbers, *(["--quick"] if args.quick else [])])


def _check_of(row: Mapping[str, Any]) -> dict[str, Any]:
    ratio = row["tuned_seconds"] / row["best_seconds"]
    return check(f"{row['name']}: tuned, of the best", ratio, MOST_ABOVE_BEST, "lower")


def markdown(result: Mapping[str, Any]) -> str:
    """The table that is kept."""
    lines = [
        "# Tuned, beside all that there is",
        "",
        f"{on_what(result)}. `python benchmarks/tune_beside_all.py DIR {result['options']}`:",
        f"a Llama of 14 M parameters, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens a backward, fp32, clipping; medians.",
        "",
        "| training | configurations | fit | began with | tuned | of the best | the best of all |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for row in result["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    cells = [
        row["name"],
        str(row["num_all"]),
        str(row["num_that_fit"]),
        *(format_seconds(row[name]) for name in ("began_seconds", "tuned_seconds")),
        f"{row['tuned_seconds'] / row['best_seconds']:.2f}",
        f"{format_seconds(row['best_seconds'])}: {row['best'].replace('_', ' ')}",
    ]
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="profile; else the machine is calibrated")
    parser.add_argument("--trials", type=count, default=9, help="configurations that tune tries; 9")
    parser.add_argument("--rounds", type=count, default=3, help="of those near the best; 3")
    parser.add_argument("--steps", type=count, default=5, help="of a turn that count; 5")
    parser.add_argument("--quick", action="store_true", help="the first training, with all states on one tier, alone")
    add_result_files(parser)
    return parser.parse_args()


def main() -> None:
    """Run and report."""
    args = arguments()
    tell_with_table(run(args), args, markdown)


if __name__ == "__main__":
    main()
