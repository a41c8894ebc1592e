"""How near the optimizer's kernels come to what memory allows, and how torch's own optimizers do on the same machine.

The limit is a loop that reads and writes exactly the bytes that the kernel must, and computes nothing: the fastest of a
few, which differ in how long they stay with one array. Of a group of contenders each runs once in every repetition, in
rotating order. Ratios are medians over the repetitions; above 1 is better for us. Before anything is timed, the first
elements are compared with the reference, bit for bit.

    python benchmarks/adam_kernel.py --json adam_kernel.json --plot adam_kernel.svg
    python benchmarks/adam_kernel.py --quick --threads 2 --target avx2

Arrays of zerooffload ask for huge pages and begin on a page, each moved on by another multiple of 576 bytes: where all
begin at a multiple of a power of two they displace each other in the caches. The peers' arrays lie where torch puts
them, and ask for huge pages too unless THP_MEM_ALLOC_ENABLE=0 is set. Peers keep gradient and moments in the
parameter's format; those of bf16 parameters have no master, so that they do less.

Prints two tables and the checks; with `--json` writes one object: machine, versions, rows with all repetitions, and
checks. A missed target does not change the exit status.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_arrays import CONFIGURATIONS, PATTERN_NUMEL, Configuration, Contenders, Memory, OurStep, Stream, Traffic
from kernel_job import ACCUMULATE_FEWEST, ACCUMULATE_SEPARATE, JOB_FEWEST, JOB_SEPARATE, OurJob, TorchJob
from kernel_peers import peers_of
from kernel_report import FP32_MOMENTS, JOB_TARGET, chart, job_checks, machine, show, step_checks, versions
from kernel_timing import fastest, huge_bytes, measured, quartiles, row_of

from zerooffload import native
from zerooffload.machine.cores import usable_cores
from zerooffload.optim.kernels import NativeKernels


class Bench:
    """What all measurements share."""

    def __init__(self, numel: int, threads: int, repeats: int) -> None:
        self.memory = Memory(numel)
        self.kernels = NativeKernels(threads)
        self.pool = native.module.ThreadPool(threads)
        self.repeats = repeats

    def step_row(self, configuration: Configuration) -> dict[str, Any]:
        """The row of a configuration."""
        before = huge_bytes()
        ours = OurStep(configuration, self.memory, self.kernels)
        on_huge_pages = huge_bytes() - before
        ours.verify()
        limits = Traffic(self.pool, ours.passes()).variants("traffic")
        peers, missing = peers_of(configuration, self.memory)
        if configuration.moments != "fp32":
            peers[FP32_MOMENTS] = OurStep(replace(configuration, moments="fp32"), self.memory, self.kernels)
        seconds = measured({configuration.name: ours, **limits, **peers}, self.repeats)
        roles = {"limits": list(limits), "peers": list(peers)}
        row = row_of(configuration.name, self.memory.numel, ours.bytes_per_param, seconds, roles)
        arrays = (ours.param, ours.grad, *ours.record.values())
        row |= {"table": "step", "target": configuration.target, "missing_peers": missing}
        row["huge_page_share"] = min(1.0, on_huge_pages / sum(array.nbytes for array in arrays))
        return row

    def job_rows(self) -> list[dict[str, Any]]:
        """The rows of the whole job and of its first sweep."""
        ours, peer = OurJob(self.memory, self.kernels), TorchJob(self.memory)
        ours.verify()
        arrival = [Stream(ours.source, written=False), Stream(ours.total, written=True)]
        update = ours.update.passes()
        sweeps = {
            "accumulate": Traffic(self.pool, [arrival]).variants("traffic of accumulating"),
            "update": Traffic(self.pool, update).variants("traffic of the step"),
            "job": Traffic(self.pool, [arrival, *update]).variants("traffic of both sweeps"),
        }
        first, whole = "accumulate with norm", "whole job"
        firsts: Contenders = {ACCUMULATE_SEPARATE: peer.accumulate_separately, ACCUMULATE_FEWEST: peer.accumulate}
        wholes: Contenders = {JOB_SEPARATE: peer.separately, JOB_FEWEST: peer.with_fewest_passes}
        loops = sweeps["accumulate"] | sweeps["update"] | sweeps["job"]
        all_ours: Contenders = {first: ours.accumulate, whole: ours}
        seconds = measured(all_ours | loops | firsts | wholes, self.repeats)
        first_bytes = ours.source.element_size() + 2 * ours.total.element_size()
        rows = []
        for name, nbytes, limits, peers, target in (
            (first, first_bytes, sweeps["accumulate"], firsts, None),
            (whole, first_bytes + ours.update.bytes_per_param, sweeps["job"], wholes, JOB_TARGET),
        ):
            roles = {"limits": list(limits), "peers": list(peers)}
            rows.append(row_of(name, self.memory.numel, nbytes, seconds, roles) | {"table": "job", "target": target})
        sweep = fastest(seconds, list(sweeps["update"]))
        rows[1]["sweeps"] = quartiles([o / s for o, s in zip(seconds[whole], seconds[sweep], strict=True)])
        rows[1]["seconds"][sweep] = seconds[sweep]
        return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Verify, measure and print the tables; the result object."""
    bench = Bench(args.numel, args.threads, args.repeats)
    where = machine(args.threads)
    pages = "and torch's too" if where["torch_huge_pages"] else "but torch's do not"
    print(f"{args.numel} parameters, {args.repeats} repetitions, {bench.kernels.name} on {where['cpu']}")
    print(f"load average before: {where['load_average'][0]:.2f} (anything else that runs here takes from the figures)")
    print(f"huge pages: our arrays ask for them, {pages}; the system says {where['transparent_huge_pages']}\n")
    heads = f"{'Gparam/s':>9}{'B/param':>9}{'GB/s':>8}  of limit [quartiles]"
    print(f"{'step':24}{heads}")
    steps = []
    for configuration in CONFIGURATIONS:
        steps.append(bench.step_row(configuration))
        show(steps[-1])
        gc.collect()
    print(f"\n{'from a bf16 gradient':24}{heads}")
    jobs = bench.job_rows()
    for row in jobs:
        show(row)
    share = statistics.median(row["huge_page_share"] for row in steps)
    print(f"\n{share:.0%} of our arrays' bytes lay on huge pages")
    return {
        "machine": where,
        "command": sys.argv[1:],
        "versions": versions(),
        "numel": args.numel,
        "rows": [*steps, *jobs],
        "checks": [*step_checks(steps), *job_checks(*jobs)],
    }


def numel_of(text: str) -> int:
    """A number of elements: 134217728 or 2**27."""
    base, _, exponent = text.partition("**")
    numel = int(int(base) ** int(exponent or 1))
    if numel <= 0 or numel % PATTERN_NUMEL:
        raise argparse.ArgumentTypeError(f"expected a multiple of {PATTERN_NUMEL} elements, got {numel}")
    return numel


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=numel_of, help="parameters, 2**27 if nothing is said")
    parser.add_argument("--repeats", type=int, help="repetitions, 9 if nothing is said")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of the kernels and of torch")
    parser.add_argument("--target", choices=native.module.supported_targets() if native.available else [])
    parser.add_argument("--quick", action="store_true", help="2**22 parameters and 3 repetitions: a trial, no result")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="the ratios to the limit as a chart")
    args = parser.parse_args()
    args.numel = args.numel or (2**22 if args.quick else 2**27)
    args.repeats = args.repeats or (3 if args.quick else 9)
    return args


def main() -> None:
    """Run and report."""
    # DeepSpeed and torch.compile build with the ninja that is installed beside this python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    # Read by torch at its first large allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not native.available:
        raise SystemExit(f"there are no native kernels to time: {native.why_unavailable}")
    args = arguments()
    if args.target:
        native.module.set_target(args.target)
    torch.set_num_threads(args.threads)
    result = run(args)
    print()
    for item in result["checks"]:
        verdict = "ok" if item["ok"] else "MISSED"
        print(f"{verdict:7}{item['name']}: {item['value']:.3f} ({item['better']} than {item['target']} is wanted)")
    missed = [item["name"] for item in result["checks"] if not item["ok"]]
    print(f"\n{len(missed)} of {len(result['checks'])} targets missed{': ' if missed else ''}{'; '.join(missed)}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        args.plot.write_text(chart(result["rows"]))


if __name__ == "__main__":
    main()
