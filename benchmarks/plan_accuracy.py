"""How far plans are off: step time, bytes by link and memory, predicted and measured, of 24 trainings.

Three Llamas, each from four placements with the update modes that fit them, with one and with two backwards a step, on
this machine's CPU or device. The machine is calibrated first (or `--machine` is its profile). Each training is a
process of its own; all of them take turns, and every other round goes backwards. Before each turn the machine's rates
are measured again for a moment, so that the table tells both how far a plan is off, and how far it would be from the
rates of that moment: a shared machine drifts.

    python benchmarks/plan_accuracy.py /mnt/nvme --table benchmarks/results/plan_accuracy.md --json plan_accuracy.json
    python benchmarks/plan_accuracy.py /mnt/nvme --quick

A missed target does not change the exit status.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from disk_limit import add_result_files, check, count, machine, on_what, scratch_folder, tell_with_table, versions

from zerooffload.calibration import calibrate
from zerooffload.calibration.effort import Effort
from zerooffload.config import TierName
from zerooffload.formats import GIB, MIB, format_bytes, format_seconds
from zerooffload.planner.cost import estimate
from zerooffload.planner.plan import STATES, Plan
from zerooffload.planner.profiles import MachineProfile, read_machine
from zerooffload.train.planning import Planner
from zerooffload.train.recipe import Recipe, recipe_from
from zerooffload.train.tuning.trial import Job, Trial, run_trial
from zerooffload.train.tuning.tune import of_one_rank

SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
    "medium": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
    "large": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12},
}
"""14, 34 and 76 M parameters."""
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "all on host": {**dict.fromkeys(STATES, "host"), "update": "after_backward", "host_memory": 4 * GIB},
    "optimizer on nvme": {
        **dict.fromkeys(STATES, "host"),
        "optimizer": "nvme",
        "update": "under_next_forward",
        "host_memory": GIB,
    },
    "all on nvme": {**dict.fromkeys(STATES, "nvme"), "update": "after_backward", "host_memory": 512 * MIB},
    "all on nvme, ahead": {**dict.fromkeys(STATES, "nvme"), "update": "during_backward", "host_memory": 512 * MIB},
}
"""Host memory is bounded, so that plan and run have the same for chunks that stay in it."""
ACCUMULATIONS = (1, 2)
QUICK = (("small", "all on nvme", 2),)
BATCH_SIZE, SEQUENCE_LENGTH = 4, 128
NEVER_CLIPS = 1e6
"""The norm is wanted, and no clipping fires: plans presume that, see docs/planning.md."""
TEXT = "Plans are nothing; planning is everything, and a table of both is worth a thousand words. " * 2000
PROBE = Effort(
    rounds=3, turn_seconds=0.04, drive_turn_seconds=0.08, fill_seconds=0.3, sustained_seconds=0.1, pin_seconds=0.0
)
"""Of the machine, before each turn."""
SPACE_BYTES = 8 * GIB
MOST_AT_MEDIAN, MOST_AT_WORST, MOST_OF_MEMORY, MOST_OF_BYTES = 0.10, 0.20, 0.10, 0.01


@dataclass
class Combination:
    """A training, its plan, and what its turns took."""

    size: str
    placement: str
    accumulation: int
    recipe: Recipe
    plan: Plan
    trials: list[Trial] = field(default_factory=list)
    then_seconds: list[float] = field(default_factory=list)
    """Predicted from the rates of each turn's minute."""

    @property
    def name(self) -> str:
        """In checks."""
        return f"{self.size}, {self.placement}, {self.accumulation} backward(s)"

    def row(self) -> dict[str, Any]:
        """All of it, as numbers."""
        steps = [seconds for trial in self.trials for seconds in trial.step_seconds]
        accounts = {account.tier: account for account in self.plan.estimate.memory}
        host, last = accounts[TierName.HOST], self.trials[-1]
        links = {
            link: {"predicted": nbytes, "measured": statistics.fmean(trial.bytes_moved[link] for trial in self.trials)}
            for link, nbytes in self.plan.estimate.bytes_moved.items()
        }
        return {
            "name": self.name,
            "size": self.size,
            "placement": self.placement,
            "update": str(self.plan.kind.schedule),
            "accumulation": self.accumulation,
            "step_seconds": {
                "predicted": self.plan.estimate.seconds,
                "predicted_then": statistics.fmean(self.then_seconds),
                "measured": statistics.median(steps),
                "all": steps,
            },
            "bound": self.plan.estimate.bound,
            "busy_seconds": dict(self.plan.estimate.busy),
            "bytes_moved": {link: both for link, both in links.items() if any(both.values())},
            "leased_bytes": {
                tier.value: {"predicted": account.leased_bytes, "measured": last.peak_bytes[tier.value]}
                for tier, account in accounts.items()
            },
            "memory_bytes": {
                "predicted": host.leased_bytes + max(host.activations.values(), default=0),
                "measured": max(trial.process_peak_bytes - trial.baseline_bytes for trial in self.trials),
            },
        }


def off(both: Mapping[str, float], predicted: str = "predicted") -> float:
    """By which part of what was measured a prediction is off."""
    return both[predicted] / both["measured"] - 1 if both["measured"] else float(both[predicted] != 0)


def combinations(args: argparse.Namespace, folder: Path, profile: MachineProfile) -> Iterator[Combination]:
    """All of them, planned."""
    planner = Planner()
    for size, placement, accumulation in QUICK if args.quick else product(SIZES, PLACEMENTS, ACCUMULATIONS):
        recipe = recipe_of(folder, size, placement, accumulation)
        yield Combination(size, placement, accumulation, recipe, planner.plan(recipe, profile))


def recipe_of(folder: Path, size: str, placement: str, accumulation: int) -> Recipe:
    """A Llama on bytes; the gradients are clipped."""
    config = {"model_type": "llama", "vocab_size": 257, "max_position_embeddings": SEQUENCE_LENGTH, **SIZES[size]}
    return recipe_from(
        {
            "model": {"config": {**config, "num_key_value_heads": config["num_attention_heads"]}},
            "data": {"path": str(folder / "text.txt")},
            "offload": {**PLACEMENTS[placement], "nvme_paths": [str(folder)]},
            "training": {
                "steps": 1,
                "batch_size": BATCH_SIZE,
                "sequence_length": SEQUENCE_LENGTH,
                "accumulation_steps": accumulation,
                "max_grad_norm": NEVER_CLIPS,
            },
        }
    )


def take_turn(one: Combination, folder: Path, args: argparse.Namespace) -> None:
    """Measure the machine, then train."""
    then = of_one_rank(calibrate([folder], effort=PROBE))
    then = then.model_copy(update={"corrections": one.plan.machine.corrections})
    one.then_seconds.append(estimate(one.plan.announced, one.plan.model, then, one.plan.kind).seconds)
    job = Job(recipe=one.recipe, num_steps=args.steps, num_warm_up=args.warm_up)
    one.trials.append(run_trial(job, "training"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as numbers."""
    with scratch_folder(args.path, SPACE_BYTES) as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        begin = time.perf_counter()
        profile = of_one_rank(calibrate([folder]) if args.machine is None else read_machine(args.machine))
        tried = list(combinations(args, folder, profile))
        for number in range(args.rounds):
            for one in tried if number % 2 == 0 else tried[::-1]:
                take_turn(one, folder, args)
                seconds = statistics.median(one.trials[-1].step_seconds)
                predicted = f"{one.plan.estimate.seconds:.3f} s predicted, {one.then_seconds[-1]:.3f} s then"
                print(f"{one.name}: {seconds:.3f} s, {predicted}", file=sys.stderr, flush=True)
        rows = [one.row() for one in tried]
        return {
            "machine": {**machine(folder), "profile": profile.model_dump(mode="json")},
            "versions": versions("transformers"),
            "seconds": time.perf_counter() - begin,
            "rows": rows,
            "checks": checks(rows),
        }


def checks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is aimed at."""
    steps = sorted(abs(off(row["step_seconds"])) for row in rows)
    links = [abs(off(both)) for row in rows for both in row["bytes_moved"].values()]
    unequal = [row for row in rows for both in row["leased_bytes"].values() if both["predicted"] != both["measured"]]
    return [
        check("step, off at the median", statistics.median(steps), MOST_AT_MEDIAN, "lower"),
        check("step, off at worst", steps[-1], MOST_AT_WORST, "lower"),
        check("moved by a link, off at worst", max(links, default=0.0), MOST_OF_BYTES, "lower"),
        check("leases that are not as planned", len(unequal), 0, "lower"),
        check(
            "leased and activations, off at worst",
            max(abs(off(row["memory_bytes"])) for row in rows),
            MOST_OF_MEMORY,
            "lower",
        ),
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The table that is kept."""
    batch = f"{BATCH_SIZE} x {SEQUENCE_LENGTH} tokens a backward"
    columns = (
        *("model", "placement", "update", "backwards", "predicted", "then", "measured", "off", "off then", "bytes off"),
        *("leases", "memory predicted", "measured", "off"),
    )
    lines = [
        "# What plans said, and what came",
        "",
        f"{on_what(result)}. `python benchmarks/plan_accuracy.py DIR`: {batch}, fp32; the norm is",
        "taken, and no clipping fires; medians.",
        "*Then* is what the plan says with the machine's rates of the minutes in which the steps ran; *bytes* those of",
        "the link that is off the most; *memory* what is leased, with activations.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(_line(row) for row in result["rows"]),
        "",
        "| aimed at | is | at most |",
        "|---|---|---|",
        *(f"| {item['name']} | {item['value']:.3f} | {item['target']} |" for item in result["checks"]),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    step, memory = row["step_seconds"], row["memory_bytes"]
    links = max((off(both) for both in row["bytes_moved"].values()), key=abs, default=0.0)
    exact = all(both["predicted"] == both["measured"] for both in row["leased_bytes"].values())
    cells = [
        row["size"],
        row["placement"],
        row["update"].replace("_", " "),
        str(row["accumulation"]),
        *(format_seconds(step[which]) for which in ("predicted", "predicted_then", "measured")),
        f"{off(step):+.1%}",
        f"{off(step, 'predicted_then'):+.1%}",
        f"{links:+.2%}",
        "exact" if exact else "**differ**",
        *(format_bytes(int(memory[which])) for which in ("predicted", "measured")),
        f"{off(memory):+.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="profile; else the machine is calibrated")
    parser.add_argument("--quick", action="store_true", help="one small one alone")
    parser.add_argument("--rounds", type=count, default=2, help="2")
    parser.add_argument(
        "--steps", type=count, default=6, help="of a turn that count, even: updates go there and back; 6"
    )
    parser.add_argument("--warm-up", type=count, default=3, help="steps before; 3")
    add_result_files(parser)
    return parser.parse_args()


def main() -> None:
    """Run and report."""
    args = arguments()
    tell_with_table(run(args), args, markdown)


if __name__ == "__main__":
    main()
