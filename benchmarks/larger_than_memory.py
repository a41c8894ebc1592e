"""Train a Llama whose states are larger than the memory that the process may take.

The model has random weights and is built on the meta device: it never exists whole. With `--cgroup` the process moves
itself into a memory cgroup of that size first, where it may (root, cgroup v1 or v2), so that the kernel holds it to it.

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
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import zerooffload as zo
from zerooffload.formats import format_bytes, parse_bytes
from zerooffload.memory import cgroup_limit_bytes
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
    parser.add_argument("--cgroup", help="memory limit to put this process under")
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


def enter_cgroup(limit_bytes: int) -> str:
    """Move this process under a memory limit; say what was done."""
    for root, limit_name in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = root / f"larger-than-memory-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit_name).write_text(str(limit_bytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return f"memory cgroup of {format_bytes(limit_bytes)}"
    return "no memory cgroup could be made here"


def run(args: argparse.Namespace) -> dict[str, object]:
    """Train, and return the result object."""
    limited = enter_cgroup(parse_bytes(args.cgroup)) if args.cgroup else "no cgroup asked for"
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
    limit = parse_bytes(args.cgroup) if args.cgroup else cgroup_limit_bytes() or psutil.virtual_memory().total
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
        "machine": {"platform": platform.platform(), "cores": psutil.cpu_count(), "limit": limited},
        "versions": {"zerooffload": zo.__version__, "torch": torch.__version__},
        "model": {"parameters": num_params, "fp32_training_state_bytes": state_bytes},
        "ranks": world_size,
        "baseline_bytes": baseline,
        "start": started,
        "rows": rows,
        "checks": checks,
    }


def main() -> None:
    """Run and print."""
    args = arguments()
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
