"""Many steps of a tiny model with all states on nvme; in a module that spawned processes can import."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerooffload as zo


def measurements(folder: Path) -> dict[str, Any]:
    """What must not grow: descriptors, threads (Python's and all), resident bytes, and bytes of each file."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    files = {path.name: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "python threads": threading.active_count(),
        "threads": int(fields["Threads"]),
        "resident bytes": 1024 * int(fields["VmRSS"].split()[0]),
        "lengths": {name: status.st_size for name, status in files.items()},
        "blocks": {name: status.st_blocks for name, status in files.items() if name.endswith(".bin")},
    }


def train_long(rank: int, world_size: int, folder: str, marks: list[int]) -> list[dict[str, Any]]:
    """Measurements after so many steps."""
    del rank, world_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    homes: dict[str, Any] = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    zo.offload(model, zo.OffloadConfig(**homes, nvme_paths=[folder], host_memory="32MiB", threads=1))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    zo.track(model, scheduler=scheduler)
    inputs, found = torch.randn(4, 8), []
    for step in range(1, marks[-1] + 1):
        model(inputs).pow(2).mean().backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step in marks:
            # The thread that commits the step is there: it waits for the next forward.
            found.append(measurements(Path(folder)))
    zo.close(model)
    return found
