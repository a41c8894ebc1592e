"""A script that attacks for a while, and counts how the attempts end."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def attack_for_a_while(attack: Callable[..., str], description: str | None) -> None:
    """Call `attack(number, folder, measure=...)`, which returns how it ended, as long as the command line says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    end, number, slowest = time.monotonic() + options.seconds, options.seed << 32, 0.0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            began = time.perf_counter()
            try:
                outcomes[attack(number, Path(folder), measure=number % 16 == 0)] += 1
            except BaseException:
                sys.stderr.write(f"attempt {number}:\n")
                raise
            slowest = max(slowest, time.perf_counter() - began)
            number += 1
    for outcome, count in sorted(outcomes.items()):
        sys.stdout.write(f"{count:9,d}  {outcome}\n")
    sys.stdout.write(f"{sum(outcomes.values()):9,d}  in all; the slowest took {1e3 * slowest:.1f} ms\n")
