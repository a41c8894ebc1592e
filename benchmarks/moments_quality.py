"""What moments in fewer bits cost in quality: the same fine-tune with each format.

SmolLM2-135M, all parameters in fp32, AdamW, on the text that comes with Python; the loss on windows held out of it,
before and after training, for each format of the moments and each seed (of the order of the data).

    python benchmarks/moments_quality.py                      # 100 steps, three seeds: about 900 steps in all
    python benchmarks/moments_quality.py --steps 5 --seeds 1

Prints a row for each format and seed; with `--json` one object: versions, rows and checks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import torch

import zerooffload as zo
from zerooffload.integrations.huggingface import prepare_smollm2
from zerooffload.train import train
from zerooffload.train.recipe import Recipe, cache_folder

FORMATS = ("fp32", "bf16", "8bit")
TARGET = 0.005
"""Of the held-out loss with fp32 moments."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 tokens a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--work", type=Path, default=cache_folder() / "quickstart", help="folder of the model")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def recipe(args: argparse.Namespace, moments: str, seed: int) -> Recipe:
    """One run."""
    return Recipe.model_validate(
        {
            "model": {"name": str(args.work / "SmolLM2-135M-Instruct")},
            "data": {"path": str(args.work / "python-topics.txt")},
            "offload": {"compute_dtype": "fp32", "moments": moments},
            "optimizer": {"lr": args.lr},
            "schedule": {"kind": "cosine", "warmup_steps": 5, "final_fraction": 0.1},
            "training": {
                "steps": args.steps,
                "batch_size": args.batch,
                "sequence_length": 128,
                "max_grad_norm": 1.0,
                "evaluation_windows": 32,
                "seed": seed,
            },
        }
    )


def main() -> None:
    """Run and print."""
    args = arguments()
    prepare_smollm2(args.work / "SmolLM2-135M-Instruct")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    (args.work / "python-topics.txt").write_text(text, encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for moments in FORMATS:
            result = train(recipe(args, moments, seed))
            row = {
                "moments": moments,
                "seed": seed,
                "heldout_before": result.heldout_before,
                "heldout_after": result.heldout_after,
                "last_losses": mean(step.loss for step in result.steps[-10:]),
            }
            rows.append(row)
            if not args.json:
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    exact = {row["seed"]: row["heldout_after"] for row in rows if row["moments"] == "fp32"}
    checks = []
    for moments in FORMATS[1:]:
        ratios = [row["heldout_after"] / exact[row["seed"]] - 1 for row in rows if row["moments"] == moments]
        worst = max(ratios, key=abs)
        checks.append(
            {
                "name": f"held-out loss with {moments} moments over that with fp32, less 1: the largest of the seeds",
                "value": worst,
                "target": TARGET,
                "better": "lower",
                "ok": abs(worst) <= TARGET,
            }
        )
    versions = {"zerooffload": zo.__version__, "torch": torch.__version__}
    if args.json:
        print(json.dumps({"versions": versions, "rows": rows, "checks": checks}, indent=1))
        return
    for check in checks:
        print(f"{check['name']}: {check['value']:+.5f} (target: at most {check['target']}): {check['ok']}")


if __name__ == "__main__":
    main()
