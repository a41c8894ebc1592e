"""Train a Llama whose states are larger than the memory that the process may take.

The model has random weights and is built on the meta device: it never exists whole. With `--cgroup` the training runs
in a memory cgroup of that size, made for it where that is allowed (root, cgroup v1 or v2): the kernel would end it if
it took more.

    python benchmarks/larger_than_memory.py --nvme /mnt/nvme --host-memory 6GiB --cgroup 8GiB
    python benchmarks/larger_than_memory.py --nvme /mnt/nvme --gradients nvme --host-memory 2GiB --cgroup 4GiB
    torchrun --nproc-per-node 2 benchmarks/larger_than_memory.py --nvme /mnt/nvme --host-memory 3GiB

Prints a row a step; with `--json` one object: machine, versions, rows and checks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import zerooffload as zo
from zerooffload.formats import format_bytes, parse_bytes
from zerooffload.machine import cgroup_limit_bytes, host_memory_bytes
from zerooffload.telemetry import process_peak_bytes, process_resident_bytes


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="folder on the drive")
    parser.add_argument("--params", type=float, default=1.1e9, help="parameters of the model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128, help="tokens of the one sequence a step")
    parser.add_argument("--gradients", choices=("host", "nvme"), default="host")
    parser.add_argument("--host-memory", default="6GiB", help="budget of zerooffload, of each rank")
    parser.add_argument("--cgroup", help="run in a memory cgroup of this size")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def llama_of(num_params: float) -> LlamaConfig:
    """A Llama of about that size, in TinyLlama's proportions (22 layers, 2048 wide, for 1.1e9)."""
    width, layers, vocab = 2048, 22, 32000
    scale = (num_params / 1.1e9) ** (1 / 3)
    width, layers = round(width * scale / 128) * 128, round(layers * scale)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=round(width * 2.75 / 128) * 128,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=4 if (width // 64) % 4 == 0 else 1,
        vocab_size=vocab,
        use_cache=False,
    )


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A control group with that limit, removed at the end.

    Raises
    ------
    OSError
        If this process may not make one.
    """
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        limit_name = "memory.max"
    else:
        root, limit_name = root / "memory", "memory.limit_in_bytes"
    group = root / f"larger-than-memory-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit_name).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def run_in_cgroup(limit: str, others: list[str]) -> int:
    """Run the same in a child under the limit; its exit status."""
    with memory_cgroup(parse_bytes(limit)) as group:
        # The child moves itself before it starts Python: everything that it ever takes counts.
        enter = f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"'
        command = ["/bin/sh", "-c", enter, sys.executable, __file__, *others]
        return subprocess.run(command, check=False).returncode  # noqa: S603 - this script


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the result object."""
    if "RANK" in os.environ:
        dist.init_process_group()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    warm = torch.nn.Linear(64, 64)
    warm(torch.randn(8, 64)).sum().backward()
    baseline = process_resident_bytes()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_of(args.params), dtype=torch.float32)
    num_params = sum(param.numel() for param in model.parameters())
    torch.manual_seed(0)
    begin = time.perf_counter()
    zo.offload(
        model,
        zo.OffloadConfig(
            params="nvme",
            optimizer="nvme",
            gradients=args.gradients,
            nvme_paths=[args.nvme],
            host_memory=args.host_memory,
        ),
    )
    started = {"seconds": time.perf_counter() - begin, "peak_bytes": process_peak_bytes()}
    optimizer = zo.AdamW(model.parameters(), lr=1e-4)
    rows = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (1, args.sequence), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = zo.step_report(model)
        rows.append(
            {
                "step": report.step,
                "loss": loss.item(),
                "seconds": report.seconds,
                "bytes_moved": dict(report.bytes_moved),
                "waits": dict(report.waits),
                "leased_bytes": {tier.name: tier.leased_bytes for tier in report.tiers},
                "process_peak_bytes": report.process_peak_bytes,
            }
        )
        del loss
    zo.close(model)
    peak = process_peak_bytes()
    state_bytes = num_params * 16
    limit = host_memory_bytes()
    checks = [
        {"name": "process peak", "value": peak, "target": limit, "better": "lower", "ok": peak < limit},
        {
            "name": "start-up peak over training peak",
            "value": started["peak_bytes"] / peak,
            "target": 1.0,
            "better": "lower",
            "ok": started["peak_bytes"] <= peak,
        },
    ]
    return {
        "machine": {
            "platform": platform.platform(),
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "cgroup_limit_bytes": cgroup_limit_bytes(),
        },
        "command": sys.argv[1:],
        "versions": {"zerooffload": zo.__version__, "torch": torch.__version__},
        "model": {"parameters": num_params, "fp32_training_state_bytes": state_bytes},
        "ranks": world_size,
        "baseline_bytes": baseline,
        "start": started,
        "rows": rows,
        "checks": checks,
    }


def as_option(name: str, value: object) -> list[str]:
    """A parsed argument as on the command line; not the cgroup, which the child is in already."""
    if name == "cgroup" or value is False:
        return []
    return [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]


def main() -> None:
    """Run and print."""
    args = arguments()
    if args.cgroup:
        others = [word for name, value in vars(args).items() for word in as_option(name, value)]
        raise SystemExit(run_in_cgroup(args.cgroup, others))
    result = run(args)
    if int(os.environ.get("RANK", "0")):
        return
    if args.json:
        print(json.dumps(result, indent=1))
        return
    model, rows = result["model"], result["rows"]
    print(f"{model['parameters'] / 1e9:.2f} B parameters, {format_bytes(model['fp32_training_state_bytes'])} of states")
    for row in rows:
        print(
            f"step {row['step']}: loss {row['loss']:.3f}, {row['seconds']:.1f} s,"
            f" process peak {format_bytes(row['process_peak_bytes'])}"
        )
    for check in result["checks"]:
        print(f"{check['name']}: {check['value']} (target {check['better']} than {check['target']}): {check['ok']}")


if __name__ == "__main__":
    main()
